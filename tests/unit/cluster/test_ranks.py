"""Cores of a machine with two sockets, divided among ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_deberta.cluster.watchdog.ranks import divide_cores, numa_nodes


@pytest.fixture
def dgx2(tmp_path: Path) -> Path:
    """Two sockets of 24 cores with two threads each, numbered as Linux does."""
    for socket in range(2):
        low, high = 24 * socket, 48 + 24 * socket
        node = tmp_path / "node" / f"node{socket}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{low}-{low + 23},{high}-{high + 23}\n")
        for index in range(24):
            for cpu in (low + index, high + index):
                place = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
                place.mkdir(parents=True)
                (place / "core_id").write_text(f"{index}\n")
    return tmp_path


def test_ranks_stay_on_their_socket_with_whole_cores(dgx2: Path) -> None:
    shares = divide_cores(set(range(96)), 16, dgx2)
    assert shares[0] == {0, 1, 2, 48, 49, 50}
    assert shares[7] == {21, 22, 23, 69, 70, 71}
    assert shares[8] == {24, 25, 26, 72, 73, 74}
    assert sorted(cpu for share in shares for cpu in share) == list(range(96))
    assert [node for node, _ in numa_nodes(dgx2)] == [0, 1]


def test_few_cores_are_shared_and_a_rest_is_left(dgx2: Path) -> None:
    assert divide_cores({0, 1}, 3, dgx2) == [{0, 1}] * 3
    assert [len(share) for share in divide_cores(set(range(7)), 2, dgx2)] == [3, 3]


def test_this_machine() -> None:
    allowed = os.sched_getaffinity(0)
    assert divide_cores(allowed, 1) == [allowed]

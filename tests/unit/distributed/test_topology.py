"""Layouts that are rejected before start-up."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from megatron_deberta.distributed.environment import RankEnvironment
from megatron_deberta.distributed.topology import (
    check_layout,
    init_process_groups,
    shutdown,
    single_process_groups,
)
from megatron_deberta.errors import RendezvousError, TopologyError

CPU = torch.device("cpu")


def _environment(rank: int, world: int, local_rank: int, local_world: int) -> RankEnvironment:
    return RankEnvironment("srun", rank, world, local_rank, local_world, "localhost", 1)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_fitting_sizes_pass(tp_size: int) -> None:
    check_layout(tp_size, _environment(5, 8, 1, 4))


@pytest.mark.parametrize(
    ("tp_size", "environment", "message"),
    [
        (3, _environment(0, 8, 0, 8), "world_size=8; choose one of [1, 2, 4, 8]"),
        (0, _environment(0, 8, 0, 8), "tensor_parallel_size=0 does not divide"),
        (16, _environment(0, 8, 0, 8), "does not divide world_size=8"),
        (8, _environment(0, 8, 0, 4), "does not divide local_world_size (ranks per node)=4"),
        (2, _environment(1, 4, 0, 2), "--distribution=block"),
    ],
)
def test_unfit_sizes_are_refused(tp_size: int, environment: RankEnvironment, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        init_process_groups(tp_size, CPU, 1.0, environment)
    assert message in str(caught.value)
    assert f"parallel.tensor_parallel_size={tp_size}" in str(caught.value)


def test_one_process_starts_nothing() -> None:
    environment = RankEnvironment("none", 0, 1, 0, 1, "localhost", 1)
    assert init_process_groups(1, CPU, 1.0, environment) == single_process_groups(CPU)
    assert not torch.distributed.is_initialized()
    shutdown()


def test_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(TopologyError, match="needs GPU 2 for local rank 2, but 2 are visible"):
        init_process_groups(1, torch.device("cuda"), 1.0, _environment(2, 4, 2, 4))


def _rank_of_two(rank: int, port: int) -> RankEnvironment:
    return RankEnvironment("torchrun", rank, 2, rank, 2, "127.0.0.1", port)


def test_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"MASTER_PORT={port} .*in use; set") as caught:
            init_process_groups(1, torch.device("cpu"), 0.1, _rank_of_two(0, port))
    assert "\n" not in str(caught.value)


def test_rank_that_waits_for_the_others_can_be_stopped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    asked = []

    def is_stopped() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 1

    with pytest.raises(InterruptedError, match="rank 1, 127.0.0.1:"):
        init_process_groups(1, torch.device("cpu"), 0.05, _rank_of_two(1, port), is_stopped)
    assert len(asked) == 2


def test_ranks_that_do_not_come_are_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RendezvousError, match="rank 0, .*cannot connect") as caught:
        init_process_groups(1, torch.device("cpu"), 0.01, _rank_of_two(0, port))
    assert "\n" not in str(caught.value)

"""Bad nodes of a run."""

from __future__ import annotations

from pathlib import Path

from megatron_deberta.cluster.bad_nodes import FILE_NAME, BadNodes
from megatron_deberta.cluster.watchdog.hang import Diagnosis

KILLED = "rank 1 on node2 was killed by signal 9 in step at step 3"


def test_failures_expire(tmp_path: Path) -> None:
    now = 1000.0
    nodes = BadNodes(tmp_path, hours=24, clock=lambda: now)
    assert nodes.current() == {}
    nodes.record_failure(Diagnosis("hang", (1,), ("node2",), "hangs"))
    now += 3600
    nodes.add("node1", "ECC", certain=True)
    assert list(nodes.current()) == ["node2", "node1"]
    assert nodes.current()["node2"].reason == "hangs"
    now = 1000.0 + 24 * 3600
    assert list(nodes.current()) == ["node1"]
    # Another process sees the same.
    assert list(BadNodes(tmp_path, hours=24, clock=lambda: now).current()) == ["node1"]


def test_two_killed_ranks_make_a_node_bad(tmp_path: Path) -> None:
    nodes = BadNodes(tmp_path, hours=24)
    assert nodes.record_failure(Diagnosis("death", (1,), ("node2",), KILLED)) == ""
    assert nodes.current() == {}
    nodes.record_failure(Diagnosis("death", (3,), ("node3",), KILLED))
    assert nodes.record_failure(Diagnosis("death", (0,), ("node2",), KILLED)) == "node2"
    assert list(nodes.current()) == ["node2"]


def test_program_errors_and_ambiguous_hangs_do_not_count(tmp_path: Path) -> None:
    nodes = BadNodes(tmp_path, hours=24)
    for _ in range(3):
        nodes.record_failure(
            Diagnosis("death", (1,), ("node2",), "rank 1 on node2 ended with 1 in step")
        )
        nodes.record_failure(Diagnosis("hang", (), (), "no rank is behind"))
        nodes.record_failure(Diagnosis("hang", (0, 2), ("node1", "node2"), "either"))
    assert nodes.current() == {}


def test_incomplete_line_is_ignored(tmp_path: Path) -> None:
    nodes = BadNodes(tmp_path, hours=24)
    nodes.add("node1", "ECC", certain=True)
    with (tmp_path / FILE_NAME).open("a") as stream:
        stream.write('{"node": "no')
    assert list(nodes.current()) == ["node1"]

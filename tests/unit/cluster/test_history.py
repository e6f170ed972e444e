"""When a run goes on, when it is over, and when it gets nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, step_dir
from megatron_deberta.cluster.slurm.history import JobHistory


def commit(run_dir: Path, step: int) -> None:
    folder = step_dir(run_dir, step)
    folder.mkdir(parents=True)
    (folder / COMMITTED_FILE).touch()


def begin(chain: JobHistory) -> None:
    chain.append("start", link="1.0", step=chain.committed_step(), nodes="n")


def finish(chain: JobHistory, code: int) -> tuple[bool, int, str]:
    decision = chain.decide(code)
    chain.append("end", goes_on=decision.goes_on, reason=decision.reason)
    return decision.goes_on, decision.code, decision.reason


@pytest.mark.parametrize(
    ("code", "goes_on", "exit_code"),
    [(0, False, 0), (75, True, 75), (1, True, 75), (137, True, 75), (-9, True, 75),
     (2, False, 2), (93, False, 93)],
)  # fmt: skip
def test_what_follows_an_exit_code(
    tmp_path: Path, code: int, goes_on: bool, exit_code: int
) -> None:
    chain = JobHistory(tmp_path)
    chain.append("submit")
    begin(chain)
    commit(tmp_path, 5)
    assert finish(chain, code)[:2] == (goes_on, exit_code)
    assert bool(chain.is_over()) is not goes_on
    chain.append("submit")
    assert chain.is_over() == ""


def test_three_links_without_progress_are_the_end(tmp_path: Path) -> None:
    chain = JobHistory(tmp_path)
    chain.append("submit")
    for _ in range(2):
        begin(chain)
        assert finish(chain, 1)[0]
    begin(chain)
    assert finish(chain, 1)[:2] == (False, 93)
    assert "made no progress" in chain.is_over()


def test_progress_starts_the_count_anew_and_lost_links_count(tmp_path: Path) -> None:
    chain = JobHistory(tmp_path)
    chain.append("submit")
    for step in range(1, 9):
        begin(chain)
        begin(chain)  # after a node died: no end
        assert chain.stalled_links() == 2
        commit(tmp_path, step)
        assert chain.stalled_links() == 0
        assert finish(chain, 137)[0]
    for _ in range(3):
        begin(chain)
    assert chain.stalled_links() == 3
    assert finish(chain, 75)[:2] == (False, 93)
    chain.append("submit")
    assert chain.stalled_links() == 0


def test_cancelled(tmp_path: Path) -> None:
    chain = JobHistory(tmp_path)
    chain.append("submit")
    assert not chain.is_running()
    begin(chain)
    chain.append("cancel")
    assert chain.is_running()
    assert finish(chain, 75) == (False, 0, "cancelled")
    assert chain.is_over() == "cancelled"
    assert not chain.is_running()


def test_torn_lines_are_left_out(tmp_path: Path) -> None:
    chain = JobHistory(tmp_path)
    assert chain.records() == []
    chain.append("submit")
    with chain.path.open("a") as stream:
        stream.write('{"event": "sta\n[1]\n')
    begin(chain)
    assert [record["event"] for record in chain.records()] == ["submit", "start"]

"""Job history: what follows an attempt, and when a run ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, step_dir
from megatron_deberta.cluster.slurm.history import JobHistory


def commit(run_dir: Path, step: int) -> None:
    folder = step_dir(run_dir, step)
    folder.mkdir(parents=True)
    (folder / COMMITTED_FILE).touch()


def begin(history: JobHistory) -> None:
    history.start_attempt("1.0", "n")


def finish(history: JobHistory, code: int) -> tuple[bool, int, str]:
    decision = history.decide(code)
    history.end_attempt("1.0", decision, code)
    return decision.continues, decision.code, decision.reason


@pytest.mark.parametrize(
    ("code", "continues", "exit_code"),
    [(0, False, 0), (75, True, 75), (1, True, 75), (137, True, 75), (-9, True, 75),
     (2, False, 2), (93, False, 93), (130, False, 130)],
)  # fmt: skip
def test_decision_by_exit_code(tmp_path: Path, code: int, continues: bool, exit_code: int) -> None:
    history = JobHistory(tmp_path)
    history.append("submit")
    begin(history)
    commit(tmp_path, 5)
    assert finish(history, code)[:2] == (continues, exit_code)
    assert bool(history.end_reason()) is not continues
    history.append("submit")
    assert history.end_reason() == ""


def test_run_ends_after_three_attempts_without_progress(tmp_path: Path) -> None:
    history = JobHistory(tmp_path)
    history.append("submit")
    for _ in range(2):
        begin(history)
        assert finish(history, 1)[0]
    begin(history)
    assert finish(history, 1)[:2] == (False, 93)
    assert "made no new checkpoint" in history.end_reason()


def test_progress_resets_the_count_of_stalled_attempts(tmp_path: Path) -> None:
    history = JobHistory(tmp_path)
    history.append("submit")
    for step in range(1, 9):
        begin(history)
        begin(history)  # after a node died: no end
        assert history.stalled_attempts() == 2
        commit(tmp_path, step)
        assert history.stalled_attempts() == 0
        assert finish(history, 137)[0]
    for _ in range(3):
        begin(history)
    assert history.stalled_attempts() == 3
    assert finish(history, 75)[:2] == (False, 93)
    history.append("submit")
    assert history.stalled_attempts() == 0


def test_cancelled(tmp_path: Path) -> None:
    history = JobHistory(tmp_path)
    history.append("submit")
    assert not history.is_running()
    begin(history)
    history.append("cancel")
    assert history.is_running()
    assert finish(history, 75) == (False, 0, "cancelled")
    assert history.end_reason() == "cancelled"
    assert not history.is_running()


def test_incomplete_lines_are_ignored(tmp_path: Path) -> None:
    history = JobHistory(tmp_path)
    assert history.records() == []
    history.append("submit")
    with history.path.open("a") as stream:
        stream.write('{"event": "sta\n[1]\n')
    begin(history)
    assert [record["event"] for record in history.records()] == ["submit", "start"]

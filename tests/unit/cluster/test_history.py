"""Job history: what follows an attempt, and when a run ends."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, step_dir
from megatron_deberta.cluster.slurm.history import MAX_STARTUP_STOPS, Decision, JobHistory


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
    assert "made no progress" in history.end_reason()


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
    assert finish(history, 1)[:2] == (False, 93)
    history.append("submit")
    assert history.stalled_attempts() == 0


def attempt(history: JobHistory, number: int, resumed: int, *saved: int, code: int = 1) -> bool:
    """Record an attempt that resumes at a sample, saves at others and ends; whether it goes on."""
    history.start_attempt(f"7.{number}", "n")
    history.append("resume", step=resumed // 8, samples=resumed)
    for samples in saved:
        history.append("checkpoint", step=samples // 8, samples=samples)
    decision = history.decide(code)
    history.end_attempt(f"7.{number}", decision, code)
    return decision.continues


def test_progress_after_a_rollback_below_earlier_starts(tmp_path: Path) -> None:
    history = JobHistory(tmp_path)
    history.append("submit")
    commit(tmp_path, 100)
    # The checkpoint of step 100 goes: the rollback returns to step 40, behind all samples used.
    assert attempt(history, 0, 800)
    assert attempt(history, 1, 800)
    shutil.rmtree(step_dir(tmp_path, 100))
    for number in range(2, 12):
        commit(tmp_path, 40 + number)
        assert attempt(history, number, 900 + 8 * number, 908 + 8 * number)
        assert history.stalled_attempts() == 0


def test_progress_below_a_damaged_newest_checkpoint(tmp_path: Path) -> None:
    history = JobHistory(tmp_path)
    history.append("submit")
    # Damaged, and newer than all that the run can save for a while.
    commit(tmp_path, 500)
    for number in range(10):
        commit(tmp_path, 101 + number)
        assert attempt(history, number, 800 + 8 * number, 808 + 8 * number)
    assert history.stalled_attempts() == 0


def test_checkpoint_that_no_attempt_can_resume_is_no_progress(tmp_path: Path) -> None:
    history = JobHistory(tmp_path)
    history.append("submit")
    # The newest attempt's checkpoint may be good; those of the others were not.
    assert [attempt(history, number, 800, 1600) for number in range(5)] == [True] * 5
    assert history.stalled_attempts() == 0
    history.start_attempt("7.5", "n")
    history.append("resume", step=100, samples=800)
    assert history.decide(1) == Decision(
        False,
        93,
        "6 consecutive job attempts made no progress; see the logs, then start the run again",
    )


def test_attempts_stopped_during_start_up_are_counted_apart(tmp_path: Path) -> None:
    history = JobHistory(tmp_path)
    history.append("submit")
    for number in range(MAX_STARTUP_STOPS - 1):
        if number % 2:
            # Killed at the end of the grace time, the batch script too.
            history.start_attempt(f"7.{number}", "n")
            history.append("signal", link=f"7.{number}", signal="SIGTERM", starting=True)
        else:
            assert attempt(history, number, 800, code=75)
    assert history.stalled_attempts() == 0
    assert attempt(history, 100, 800)
    assert attempt(history, 101, 800)
    # Two failures among them are two, and a third is one too many.
    assert not attempt(history, 102, 800)
    history.append("submit")
    for number in range(MAX_STARTUP_STOPS - 1):
        assert attempt(history, number, 800, code=75)
    assert not attempt(history, MAX_STARTUP_STOPS, 800, code=75)
    assert "told to stop before their first step" in history.end_reason()


def test_late_end_of_a_superseded_attempt_does_not_count(tmp_path: Path) -> None:
    history = JobHistory(tmp_path)
    history.append("submit")
    history.start_attempt("7.0", "n1")
    history.start_attempt("7.1", "n2")
    history.end_attempt("7.0", Decision(False, 93, "3 attempts"), 1)
    assert history.end_reason() == ""
    assert history.is_running()
    assert history.is_superseded("7.0")
    assert not history.is_superseded("7.1")
    # An attempt whose start could not be recorded on a full disk is the newest.
    assert not history.is_superseded("7.2")
    history.end_attempt("7.1", Decision(False, 0, "finished"), 0)
    assert history.end_reason() == "finished"


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

"""Job history: what follows an attempt, and when a run ends."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, step_dir
from megatron_deberta.cli.main import main
from megatron_deberta.cluster.profile import load_profile
from megatron_deberta.cluster.slurm.history import (
    MAX_STARTUP_STOPS,
    BadNodes,
    Decision,
    JobHistory,
    StopTime,
    measured_stop_time,
)
from megatron_deberta.cluster.slurm.submit import check_stop_time
from megatron_deberta.cluster.watchdog.detection import Diagnosis
from megatron_deberta.errors import EXIT_USAGE, ConfigError


def commit(run_dir: Path, step: int) -> None:
    folder = step_dir(run_dir, step)
    folder.mkdir(parents=True)
    (folder / COMMITTED_FILE).touch()


@pytest.fixture
def history(tmp_path: Path) -> JobHistory:
    history = JobHistory(tmp_path)
    history.append("submit")
    return history


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
def test_decision_by_exit_code(
    history: JobHistory, tmp_path: Path, code: int, continues: bool, exit_code: int
) -> None:
    begin(history)
    commit(tmp_path, 5)
    assert finish(history, code)[:2] == (continues, exit_code)
    assert bool(history.end_reason()) is not continues
    history.append("submit")
    assert history.end_reason() == ""


def test_progress_resets_the_count_of_stalled_attempts(history: JobHistory, tmp_path: Path) -> None:
    for step in range(1, 9):
        begin(history)
        begin(history)  # after a node died: no end
        assert history.stalled_attempts()[0] == 2
        commit(tmp_path, step)
        assert history.stalled_attempts()[0] == 0
        assert finish(history, 137)[0]
    for _ in range(3):
        begin(history)
    assert history.stalled_attempts()[0] == 3
    assert finish(history, 1)[:2] == (False, 93)
    history.append("submit")
    assert history.stalled_attempts()[0] == 0


def attempt(history: JobHistory, number: int, resumed: int, *saved: int, code: int = 1) -> bool:
    """Record an attempt that resumes at a sample, saves at others and ends; whether it goes on."""
    history.start_attempt(f"7.{number}", "n")
    history.append("resume", step=resumed // 8, samples=resumed)
    for samples in saved:
        history.append("checkpoint", step=samples // 8, samples=samples)
    decision = history.decide(code)
    history.end_attempt(f"7.{number}", decision, code)
    return decision.continues


def test_progress_after_a_rollback_below_earlier_starts(
    history: JobHistory, tmp_path: Path
) -> None:
    commit(tmp_path, 100)
    # The checkpoint of step 100 goes: the rollback returns to step 40, behind all samples used.
    assert attempt(history, 0, 800)
    assert attempt(history, 1, 800)
    shutil.rmtree(step_dir(tmp_path, 100))
    for number in range(2, 12):
        commit(tmp_path, 40 + number)
        assert attempt(history, number, 900 + 8 * number, 908 + 8 * number)
        assert history.stalled_attempts()[0] == 0


def test_progress_below_a_damaged_newest_checkpoint(history: JobHistory, tmp_path: Path) -> None:
    # Damaged, and newer than all that the run can save for a while.
    commit(tmp_path, 500)
    for number in range(10):
        commit(tmp_path, 101 + number)
        assert attempt(history, number, 800 + 8 * number, 808 + 8 * number)
    assert history.stalled_attempts()[0] == 0


def test_checkpoint_that_no_attempt_can_resume_is_no_progress(history: JobHistory) -> None:
    # The newest attempt's checkpoint may be good; those of the others were not.
    assert [attempt(history, number, 800, 1600) for number in range(5)] == [True] * 5
    assert history.stalled_attempts()[0] == 0
    history.start_attempt("7.5", "n")
    history.append("resume", step=100, samples=800)
    reason = "6 consecutive job attempts made no progress; see the logs, then start the run again"
    assert history.decide(1) == Decision(False, 93, reason)


def test_attempts_stopped_during_start_up_are_counted_apart(history: JobHistory) -> None:
    for number in range(MAX_STARTUP_STOPS - 1):
        if number % 2:
            # Killed at the end of the grace time, the batch script too.
            history.start_attempt(f"7.{number}", "n")
            history.append("signal", link=f"7.{number}", signal="SIGTERM", starting=True)
        else:
            assert attempt(history, number, 800, code=75)
    assert history.stalled_attempts()[0] == 0
    assert attempt(history, 100, 800)
    assert attempt(history, 101, 800)
    # Two failures among them are two, and a third is one too many.
    assert not attempt(history, 102, 800)
    history.append("submit")
    for number in range(MAX_STARTUP_STOPS - 1):
        assert attempt(history, number, 800, code=75)
    assert not attempt(history, MAX_STARTUP_STOPS, 800, code=75)
    assert "told to stop before their first step" in history.end_reason()


def test_late_end_of_a_superseded_attempt_does_not_count(history: JobHistory) -> None:
    history.start_attempt("7.0", "n1")
    history.start_attempt("7.1", "n2")
    history.end_attempt("7.0", Decision(False, 93, "3 attempts"), 1)
    assert history.end_reason() == ""
    assert history.unfinished_attempt()
    assert history.is_superseded("7.0")
    assert not history.is_superseded("7.1")
    # An attempt whose start could not be recorded on a full disk is the newest.
    assert not history.is_superseded("7.2")
    history.end_attempt("7.1", Decision(False, 0, "finished"), 0)
    assert history.end_reason() == "finished"


def test_cancelled(history: JobHistory) -> None:
    assert not history.unfinished_attempt()
    begin(history)
    history.append("cancel")
    assert history.unfinished_attempt()
    assert finish(history, 75) == (False, 0, "cancelled")
    assert history.end_reason() == "cancelled"
    assert not history.unfinished_attempt()


def test_damaged_lines_are_ignored_and_spoil_no_later_one(history: JobHistory) -> None:
    with history.path.open("a") as stream:
        stream.write('{"event": "sta\n[1]\n{"event": "en')
    begin(history)
    assert [record["event"] for record in history.records()] == ["submit", "start"]
    history.path.unlink()
    assert history.records() == []


def checkpoint(time: float, save: float, step: float) -> dict[str, Any]:
    return {"event": "checkpoint", "time": time, "save_seconds": save, "step_seconds": step}


def end(time: float, code: int) -> dict[str, Any]:
    return {"event": "end", "time": time, "code": code}


def test_longest_parts_of_all_attempts() -> None:
    start = {"event": "start", "time": 0.0}
    events = [start, checkpoint(100, 4, 1), checkpoint(200, 3, 2.5), end(206, 75)]
    assert measured_stop_time(events) == StopTime(step=2.5, save=4, exit=6)
    # Neither a failure nor a stop during start-up shows how long an exit takes.
    events += [start, checkpoint(300, 3, 1), end(399, 1), start, end(500, 75)]
    events += [start, checkpoint(600, 3, 1), end(608, 75)]
    measured = measured_stop_time(events)
    assert str(measured) == "14.5 s (longest step 2.5 s, save 4.0 s, exit 8.0 s)"
    assert measured_stop_time([start, end(500, 75)]) is None
    assert measured_stop_time([start, checkpoint(1, 4, 1)]) == StopTime(1, 4, 10)


@pytest.mark.parametrize("key", ["signal_seconds", "preemption_grace_seconds"])
def test_too_little_time_is_refused(key: str) -> None:
    profile = replace(load_profile("dgx2"), **{key: 30})
    check_stop_time(profile, None)
    check_stop_time(profile, StopTime(5, 20, 5))
    with pytest.raises(ConfigError, match=rf"^{key}=30 of .* less than the 30.5 s \(longest step"):
        check_stop_time(profile, StopTime(5.5, 20, 5))


def test_submit_checks_what_the_run_has_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    config = tmp_path / "run.yaml"
    config.write_text(f"train: {{run_dir: {run_dir}}}\nprecision: {{dtype: fp32}}\n")
    options = ["--cluster", "local", "--nodes", "1", "--dry-run", "--no-check"]
    arguments = ["submit", str(config), *options]
    assert main(arguments) == 0
    JobHistory(run_dir).append(
        "checkpoint", step=7, samples=56, save_seconds=55.0, step_seconds=1.5
    )
    assert main(arguments) == EXIT_USAGE
    assert "signal_seconds=60 of the cluster profile" in capsys.readouterr().err


KILLED = "rank 1 on node2 was killed by signal 9 in step at step 3"


def test_failures_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    nodes = BadNodes(tmp_path, hours=24)
    assert nodes.current() == {}
    nodes.record_failure(Diagnosis("hang", (1,), ("node2",), "hangs"))
    now += 3600
    nodes.add("node1", "ECC", certain=True)
    assert list(nodes.current()) == ["node2", "node1"]
    assert nodes.current()["node2"].reason == "hangs"
    now = 1000.0 + 24 * 3600
    assert list(nodes.current()) == ["node1"]
    # Another process sees the same.
    assert list(BadNodes(tmp_path, hours=24).current()) == ["node1"]


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

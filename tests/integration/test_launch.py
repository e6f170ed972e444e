"""``megatron-deberta launch``: restart after the death of a rank; save of all ranks on a signal."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.cli.main import main
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.errors import EXIT_REQUEUE, EXIT_USAGE
from tests.support.jobs import ROOT, TIMEOUT, losses, recorded_steps, without_launcher


def wait_until(condition: Callable[[], bool], launcher: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


SAVE_EVERY_STEP = ("checkpoint.save_every=1", "checkpoint.asynchronous=false")


@pytest.mark.slow
def test_killed_rank_is_named_and_all_ranks_restart(
    run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    chain = JobHistory(run_dir)
    program = [sys.executable, "-m", "megatron_deberta", "launch", str(run_yaml), "--ranks", "2"]
    launcher = subprocess.Popen(
        # Starts faster than DeepSpeed, whose losses differ by rounding. Steps are slow, so that the
        # run does not end before the signal.
        [*program, f"train.run_dir={run_dir}", "parallel.engine=plain", *SAVE_EVERY_STEP],
        env=without_launcher() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def last_record() -> int:
        return max(recorded_steps(run_dir), default=0)

    try:
        wait_until(lambda: last_record() >= 9, launcher)
        ranks = psutil.Process(launcher.pid).children()
        second = next(rank for rank in ranks if rank.environ().get("RANK") == "1")
        second.kill()
        second.wait()
        first_end = last_record()
        # Steps of the second start: the first one's last ranks may still record one.
        wait_until(lambda: last_record() >= first_end + 3, launcher)
        launcher.send_signal(signal.SIGTERM)
        output, errors = launcher.communicate(timeout=TIMEOUT)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == EXIT_REQUEUE, errors
    first, last = [record for record in chain.records() if record["event"] == "end"]
    assert first["reason"].startswith("rank 1 on ")
    assert " was killed by signal 9 " in first["reason"]
    assert (first["code"], first["goes_on"], last["goes_on"]) == (1, True, False)
    assert first["step"] >= 7
    assert f"{first['reason']}; starting again" in errors
    # The terminal shows rank 0; each rank has a log.
    assert "step 1/60 | loss" in output
    (log,) = (run_dir / "logs").glob("*.0/rank_0.log")
    assert "step 1/60 | loss" in log.read_text()
    assert len(list((run_dir / "logs").glob("*.0/rank_1.log"))) == 1
    actual = losses(run_dir)
    assert committed_steps(run_dir)[-1] == len(actual) < 60
    expected = losses(uninterrupted)[: len(actual)]
    assert actual[: len(expected)] == pytest.approx(expected, rel=1e-5)


def test_invalid_layout_is_refused_at_once(run_yaml: Path, tmp_path: Path) -> None:
    launch = ["launch", str(run_yaml), f"train.run_dir={tmp_path / 'run'}", "--ranks"]
    assert main([*launch, "0"]) == EXIT_USAGE
    assert main([*launch, "3"]) == EXIT_USAGE
    assert not (tmp_path / "run").exists()

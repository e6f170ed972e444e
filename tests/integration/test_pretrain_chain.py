"""Job attempts of a run that makes progress go on, also below damaged newest checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import committed_steps, step_dir
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.errors import EXIT_DONE, EXIT_FAILURE
from tests.support.jobs import Run, losses


def attempt(history: JobHistory, pretrain: Run, number: int, last_step: int) -> bool:
    """Train up to a step and record a node failure there; return whether the job continues."""
    history.start_attempt(f"7.{number}", "n")
    assert pretrain("checkpoint.save_every=2", f"train.exit_step={last_step}")[0] == EXIT_DONE
    decision = history.decide(EXIT_FAILURE)
    history.end_attempt(f"7.{number}", decision, EXIT_FAILURE)
    return decision.continues


@pytest.mark.slow
def test_run_goes_on_below_damaged_newest_checkpoints(pretrain: Run, tmp_path: Path) -> None:
    history = JobHistory(tmp_path / "run")
    history.append("submit")
    assert attempt(history, pretrain, 0, 12)
    whole = losses(history.run_dir)
    for step in (10, 12):
        file = next(step_dir(history.run_dir, step).glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    # Until the last attempt, the newest committed checkpoint is that of step 12.
    for number, step in enumerate((9, 10, 11, 12), start=1):
        assert attempt(history, pretrain, number, step)
        assert history.stalled_attempts()[0] == 0
        assert history.committed_step() == 12
    assert committed_steps(history.run_dir)[-3:] == [10, 11, 12]
    assert losses(history.run_dir) == whole
    samples = [record["samples"] for record in history.records() if record["event"] == "resume"]
    assert samples == [0, 64, 72, 80, 88]

"""Stop signals during a save, a validation and start-up: no more work than is needed to resume."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.cluster.slurm.history import JobHistory, measured_stop_time
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE
from tests.support.jobs import Run, losses, records

VALIDATED = ("train.eval_every=1", "train.exit_step=2")


@pytest.fixture
def signal_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the n-th call of a function send SIGTERM to this process."""

    def arm(target: str, call: int = 1) -> None:
        module, name = target.rsplit(".", 1)
        original: Any = getattr(importlib.import_module(module), name)
        left = [call]

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*args, **kwargs)

        monkeypatch.setattr(target, wrapped)

    return arm


def history(run_dir: Path) -> list[tuple[str, int]]:
    return [(record["event"], record.get("samples", 0)) for record in JobHistory(run_dir).records()]


def test_signal_during_a_save_ends_with_that_save(
    pretrain: Run, tmp_path: Path, signal_in: Any
) -> None:
    run_dir = tmp_path / "run"
    JobHistory(run_dir).append("submit")
    signal_in("megatron_deberta.checkpoint.writer.write_tensors")
    # An asynchronous save does not delay the next step.
    options = ("checkpoint.save_every=1", "checkpoint.asynchronous=false")
    assert pretrain(*options)[0] == EXIT_REQUEUE
    assert committed_steps(run_dir) == [1]
    assert list(records(run_dir)) == [1]
    assert history(run_dir) == [("submit", 0), ("resume", 0), ("checkpoint", 8)]
    assert pretrain(*options)[0] == EXIT_DONE
    assert history(run_dir)[3:] == [("resume", 8), ("checkpoint", 16)]
    measured = measured_stop_time(JobHistory(run_dir).current())
    assert measured is not None
    assert 0 < measured.step < 60
    assert 0 < measured.save < 60


# The second validation is that of the last step.
@pytest.mark.parametrize("number", [1, 2])
def test_interrupted_validation_is_repeated_by_the_next_start(
    pretrain: Run, tmp_path: Path, signal_in: Any, number: int
) -> None:
    assert pretrain(*VALIDATED, run_dir="whole")[0] == EXIT_DONE
    run_dir = tmp_path / "run"
    signal_in("megatron_deberta.train.data.evaluate", number)
    assert pretrain(*VALIDATED)[0] == EXIT_REQUEUE
    assert committed_steps(run_dir) == [number]
    assert number not in records(run_dir, "validation")
    assert pretrain(*VALIDATED)[0] == EXIT_DONE
    whole = tmp_path / "whole"
    assert losses(run_dir) == losses(whole)
    assert records(run_dir, "validation") == records(whole, "validation")
    # A finished run is not validated again.
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert pretrain(*VALIDATED)[0] == EXIT_DONE
    assert (run_dir / "metrics.jsonl").read_bytes() == before

"""Bad data is skipped, repeated skips lead to a rollback, and repeated rollbacks end the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.checkpoint.local.recovery import History
from megatron_deberta.checkpoint.store import find_newest
from megatron_deberta.cli.status import describe
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.slurm.status import gather
from megatron_deberta.data.sample_log import read_sample_log
from megatron_deberta.errors import EXIT_DONE, EXIT_NEVER_REQUEUE
from megatron_deberta.objectives import MaskedLanguageModel
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics
from megatron_deberta.train.step import TrainStep
from tests.support.jobs import Run, assert_same_checkpoints, losses, records
from tests.support.losses import with_first_loss

BATCH = 8
GUARDED = (
    "stability.max_skips=2",
    "checkpoint.save_every=2",
    # An asynchronous save is committed, and counted, some steps later.
    "checkpoint.asynchronous=false",
    "train.exit_step=12",
    "data.sample_log=true",
)


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def poison(
    monkeypatch: pytest.MonkeyPatch,
    samples: range,
    change: Callable[[Tensor], Tensor] = lambda loss: loss * float("inf"),
) -> None:
    """Change the losses of some samples in training; by default they become infinite."""
    forward = MaskedLanguageModel.forward

    def spoiled(model: Any, batch: Any, seeds: Any) -> Any:
        found = forward(model, batch, seeds)
        if seeds is None or not set(samples) & set(batch.sample_index.tolist()):
            return found
        return with_first_loss(found, change)

    monkeypatch.setattr(MaskedLanguageModel, "forward", spoiled)


def samples_of(steps: range) -> range:
    """Return the samples of these steps, counted from 1."""
    return range((steps.start - 1) * BATCH, (steps.stop - 1) * BATCH)


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run_dir / FILE_NAME) if record["kind"] == "guard"]


def test_bad_batch_skips_one_update(
    pretrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, samples_of(range(7, 8)))
    code, error = pretrain(*GUARDED)
    assert code == EXIT_DONE
    assert "step 7: the loss of samples [48, 49, 50, 51" in error.replace("\n", " ")
    (event,) = events(tmp_path / "run")
    assert (event["step"], event["skip"], event["loss"]) == (7, "loss not finite", None)
    assert records(tmp_path / "run")[7]["loss"] is None
    assert list(records(tmp_path / "run")) == list(range(1, 13))
    newest = find_newest(tmp_path / "run")
    assert newest is not None
    status = gather(tmp_path / "run")
    assert (status.skipped_updates, status.rollbacks) == (1, 0)
    assert "skipped updates: 1" in describe(status)
    # A run interrupted right after the skip resumes identically.
    code, _ = pretrain(*GUARDED, "train.exit_step=7", run_dir="broken")
    assert code == EXIT_DONE
    assert pretrain(*GUARDED, run_dir="broken")[0] == EXIT_DONE
    assert losses(tmp_path / "broken") == losses(tmp_path / "run")
    assert_same_checkpoints(tmp_path / "broken", tmp_path / "run", 12)


@pytest.mark.slow
def test_repeated_skips_roll_back_and_exclude_the_data(
    pretrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    poison(monkeypatch, samples_of(range(6, 8)))
    # The checkpoint of step 6 would be inside the bad range, so step 4 must be kept.
    code, error = pretrain(
        *GUARDED, "checkpoint.keep_last=1", "checkpoint.local_every=2",
        f"checkpoint.local_dir={tmp_path / 'local'}",
    )  # fmt: skip
    assert code == EXIT_DONE
    assert "rolling back from step 7 to" in error
    # No local checkpoint of the skipped steps can be resumed.
    history = History.of_run(run_dir)
    assert history is not None
    assert history.starts == ((2, 0),)
    assert [(event["step"], event["event"]) for event in events(run_dir)] == [(4, "rollback")]
    # Steps 5 to 12 use the data after step 7.
    sample_log = read_sample_log(run_dir / "ledger")
    assert list(sample_log) == list(range(1, 13))
    assert sample_log[4] == list(samples_of(range(4, 5)))
    assert sample_log[5] == list(samples_of(range(8, 9)))
    assert records(run_dir)[12]["consumed_samples"] == 15 * BATCH
    status = gather(run_dir)
    assert (status.skipped_updates, status.rollbacks) == (2, 1)
    assert "rollbacks: 1" in describe(status)

    # Killed before the next checkpoint, it resumes from the same one with the same data excluded.
    broken = tmp_path / "broken"
    history = JobHistory(broken)
    history.append("submit")
    with monkeypatch.context() as patch:
        killed_at(patch, 5)
        with pytest.raises(Killed):
            pretrain(*GUARDED, run_dir=broken.name)
    assert pretrain(*GUARDED, run_dir=broken.name)[0] == EXIT_DONE
    assert losses(broken) == losses(run_dir)
    assert read_sample_log(broken / "ledger") == sample_log
    # The rollback lowers the step, not the samples, by which progress is counted.
    resumed = [(r["step"], r["samples"]) for r in history.records() if r["event"] == "resume"]
    saved = [(r["step"], r["samples"]) for r in history.records() if r["event"] == "checkpoint"]
    assert resumed == [(0, 0), (4, 7 * BATCH)]
    assert saved[:4] == [(2, 2 * BATCH), (4, 4 * BATCH), (6, 6 * BATCH), (6, 9 * BATCH)]
    assert_same_checkpoints(broken, run_dir, 12)


def killed_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Raise in that step, at its first execution after a rollback."""
    original = TrainStep.__call__

    def dying(self: TrainStep, done: int, *args: Any) -> Any:
        if done + 1 == step and self._guard.state.rollbacks:
            raise Killed
        return original(self, done, *args)

    patch.setattr(TrainStep, "__call__", dying)


@pytest.mark.slow
def test_repeated_rollbacks_end_the_run(
    pretrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, samples_of(range(6, 100)))
    code, error = pretrain(*GUARDED, "stability.max_rollbacks=2")
    assert code == EXIT_NEVER_REQUEUE
    assert "after 2 rollbacks without progress" in error
    # Each rollback excluded two more steps of data, and no step after 6 was reached.
    assert committed_steps(tmp_path / "run") == [2, 4]
    # A new start ends at once instead of counting from zero.
    code, error = pretrain(*GUARDED, "stability.max_rollbacks=2")
    assert code == EXIT_NEVER_REQUEUE
    assert error.count("rolling back from step") == 0


def test_a_step_that_runs_again_records_its_verdict(
    pretrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is infinite again, and no other rank can compute the same micro batches."""
    poison(monkeypatch, samples_of(range(3, 4)))
    code, error = pretrain(*GUARDED, "stability.rerun=true", "train.exit_step=4")
    assert code == EXIT_DONE
    assert "cannot be told apart" in error.replace("\n", " ")
    verdict, skip = events(tmp_path / "run")
    assert (verdict["event"], verdict["verdict"], verdict["step"]) == ("rerun", "undecided", 3)
    assert (skip["step"], skip["skip"]) == (3, "loss not finite")
    assert list(records(tmp_path / "run")) == [1, 2, 3, 4]


@pytest.mark.slow
def test_nonfinite_gradient_is_skipped(
    pretrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is finite, its gradient is not."""
    poison(
        monkeypatch,
        range(20, 21),
        lambda loss: torch.where(torch.tensor(True), loss, loss * float("inf")),
    )
    assert pretrain(*GUARDED, "train.exit_step=4")[0] == EXIT_DONE
    assert [(e["step"], e["skip"]) for e in events(tmp_path / "run")] == [
        (3, "gradient not finite")
    ]
    code, error = pretrain(*GUARDED, "stability.non_finite=stop", run_dir="strict")
    assert code == EXIT_NEVER_REQUEUE
    assert "step 3: a gradient is not finite" in error

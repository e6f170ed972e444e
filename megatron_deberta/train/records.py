"""What rank 0 records and shows of a run; ``observe.metrics`` has the files and their formats."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from megatron_deberta.checkpoint.saver import Saved
from megatron_deberta.checkpoint.writer import UNLOCKED, Fence
from megatron_deberta.config import config_to_dict, save_config
from megatron_deberta.config.phases import last_step
from megatron_deberta.config.rules import causal_fraction
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.build import Corpora, validation_loader
from megatron_deberta.data.dataset.unigram import unigram_cross_entropy, unigram_log_probabilities
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.evaluate.validation import Evaluation
from megatron_deberta.objectives import build_objective
from megatron_deberta.observe.console import LiveConsole
from megatron_deberta.observe.metrics import (
    MetricsWriter,
    RecordKind,
    WandbWriter,
    plot_loss,
    read_metrics,
)
from megatron_deberta.train.stability.rollback import Rollback
from megatron_deberta.train.state import StepResult

logger = logging.getLogger(__name__)

# Cross-entropy of the validation targets by token frequency alone, recorded at step 0
UNIGRAM_METRIC = "unigram_loss"


class RunRecords:
    """Metrics file and terminal view of a run; a context manager for rank 0.

    Args:
        config: the run.
        first_step: completed optimizer steps; later records are dropped.
        terminal: console to draw on.
        fence: lock of the run folder.
        resolved: config to save; None: ``config``, which may be that of a phase.

    Attributes:
        config: as given.
        run_dir: the run folder.
        first_step: as given.
        writer: writer of ``metrics.jsonl``.
        console: terminal view.
        longest_step: duration of the longest step of this process, in seconds.
        longest_check: duration of the longest check of replicas of this process, in seconds.
    """

    def __init__(
        self,
        config: RunConfig,
        first_step: int,
        terminal: Console,
        fence: Fence = UNLOCKED,
        resolved: RunConfig | None = None,
    ) -> None:
        self.config, whole = config, resolved or config
        self.run_dir = Path(config.train.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        fence.check()
        save_config(whole, self.run_dir / "config.yaml")
        self.first_step = first_step
        self.writer = MetricsWriter(
            self.run_dir,
            resume_step=first_step,
            tensorboard=config.log.tensorboard,
            wandb=_open_wandb(whole),
            check=fence.check,
        )
        self.console = LiveConsole(
            last_step(whole), first_step=first_step, title=str(self.run_dir), console=terminal
        )
        self.longest_step = 0.0
        self.longest_check = 0.0
        self._unigram: float | None = None

    def __enter__(self) -> RunRecords:
        """Start the terminal view."""
        self.console.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the terminal view and close the files."""
        self.console.__exit__()
        self.writer.close()

    def measure_unigram(self, vocabulary: Vocabulary, corpora: Corpora) -> None:
        """Compute the unigram baseline; record it if it differs from the last recorded one.

        It is computed at every start, because data or validation may have changed.
        """
        batches = validation_loader(self.config, vocabulary, 0, 1, corpora)
        if batches is None:
            return
        frequencies = unigram_log_probabilities(corpora.train, corpora.weights, vocabulary.size)
        # Of the form to which ``loss`` belongs.
        is_causal = causal_fraction(self.config.objective) == 1
        of_loss = (batch for batch in batches if batch.inputs.causal == is_causal)
        total, targets = unigram_cross_entropy(frequencies, of_loss)
        self._unigram = total / max(targets, 1)
        recorded = [
            record[UNIGRAM_METRIC]
            for record in read_metrics(self.writer.path)
            if UNIGRAM_METRIC in record
        ]
        # The order of the sum depends on the micro batch size.
        if recorded and math.isclose(recorded[-1], self._unigram, rel_tol=1e-9):
            return
        if recorded:
            logger.warning(
                "the validation set has changed: unigram loss %.4f, previously %.4f; do not "
                "compare validation losses before and after this start",
                self._unigram,
                recorded[-1],
            )
        values = {UNIGRAM_METRIC: self._unigram, "num_targets": targets}
        self.writer.write(0, values, kind="validation")

    def write_baseline(self, values: Mapping[str, float]) -> None:
        """Record the validation metrics of a trivial prediction, if they are not the last ones."""
        kind: RecordKind = "baseline"
        recorded = [r for r in read_metrics(self.writer.path) if r["kind"] == kind]
        if not recorded or recorded[-1] != {"step": 0, "kind": kind, **values}:
            self.writer.write(0, values, kind=kind)

    def lacks(self, kind: RecordKind, step: int) -> bool:
        """Return whether no validation, or evaluation of minimal pairs, after ``step`` is recorded.

        The unigram baseline is not one.
        """
        return not any(
            record["kind"] == kind and record["step"] == step and UNIGRAM_METRIC not in record
            for record in read_metrics(self.writer.path)
        )

    def record_step(
        self,
        step: int,
        values: Mapping[str, float],
        metrics: Mapping[str, float],
        labels: Mapping[str, float],
    ) -> None:
        """Record and show the steps since the last record.

        Args:
            step: the last one.
            values: their loss, rates and duration; with ``metrics`` the keys of the line.
            metrics: further losses and accuracies of the objective.
            labels: further keys, which are not shown.
        """
        self.console.update(step, values, metrics)
        self.writer.write(step, {**values, **metrics, **labels})

    def record_skip(self, step: int, result: StepResult) -> None:
        """Record and show that an update was skipped."""
        norm = result.outcome.grad_norm
        values = {"skip": str(result.skip), "loss": result.loss, "grad_norm": norm}
        self.writer.write(step, values, kind="guard")
        self.console.note(
            f"step {step}: no update, {result.skip} | loss {result.loss:.4f} | grad norm {norm:.3f}"
        )

    def report(self, step: int, kind: RecordKind, evaluation: Evaluation) -> None:
        """Record and show a validation, or an evaluation of minimal pairs.

        Args:
            step: completed steps.
            kind: of the record.
            evaluation: metrics, and text to show.
        """
        self.writer.write(step, evaluation.metrics, kind=kind)
        baseline = ""
        if kind == "validation" and self._unigram is not None:
            baseline = f" | unigram loss {self._unigram:.4f}"
        what = kind.replace("_", " ")
        self.console.note(f"{what} at step {step} | {evaluation.text}{baseline}")

    def record_checkpoint(self, step: int, saved: Saved) -> None:
        """Record the time that a checkpoint took."""
        values = {
            "checkpoint_step": saved.step,
            "seconds": saved.seconds,
            "blocked_seconds": saved.blocked_seconds,
        }
        self.writer.write(step, values, kind="checkpoint")

    def record_rollback(self, done: Rollback) -> None:
        """Record and show a rollback."""
        self.writer.write(done.step, {"event": "rollback", **asdict(done)}, kind="guard")
        self.console.note(
            f"rolled back from step {done.trouble_step} to the checkpoint of step {done.step} | "
            f"data continues at sample {done.consumed_samples} | {done.vain_rollbacks} in a row"
        )

    def plot(self) -> None:
        """Draw ``loss.png``."""
        unit = build_objective(self.config).loss_unit
        picture = self.run_dir / "loss.png"
        plot_loss(self.writer.path, picture, unigram=self._unigram, unit=unit)


def _open_wandb(config: RunConfig) -> WandbWriter | None:
    """Return the writer to W&B, if the run has one."""
    if not config.log.wandb:
        return None
    values = config_to_dict(config)
    # May contain secret addresses.
    del values["cluster"]["notify"]
    return WandbWriter(Path(config.train.run_dir), config.log.wandb, values)

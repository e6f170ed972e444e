"""What happens after a step besides the next one: ledger, log, validation, checkpoint.

Owns when each is due. Refuses to know each other: their order is the trainer's list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from megatron_deberta.data.ledger import Ledger
from megatron_deberta.observe.console import LiveConsole, StepRecord
from megatron_deberta.observe.metrics import MetricsWriter
from megatron_deberta.observe.throughput import ThroughputMeter
from megatron_deberta.train.evaluate import Evaluation
from megatron_deberta.train.state import Ending, StepEvent, StepResult, TrainState

logger = logging.getLogger(__name__)


class Hook(Protocol):
    """Something to do after steps. Every rank calls it, since it may be collective."""

    def after_step(self, event: StepEvent) -> None:
        """Do it, if it is due."""
        ...


class LedgerHook:
    """Records which samples this rank's step used."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def after_step(self, event: StepEvent) -> None:
        """Append the step."""
        self._ledger.append(event.state.step, event.batches)


class LogHook:
    """Writes metrics and moves the console every ``log.every`` steps; rank 0 only.

    Args:
        every: steps between records; the last step of a process has one, too.
        total_steps: where the run ends.
        meter: counts steps and time.
        writer: of ``metrics.jsonl``.
        console: of the terminal.
    """

    def __init__(
        self,
        every: int,
        total_steps: int,
        meter: ThroughputMeter,
        writer: MetricsWriter,
        console: LiveConsole,
    ) -> None:
        self._every = every
        self._total_steps = total_steps
        self._meter = meter
        self._writer = writer
        self._console = console
        self._losses: list[float] = []

    def after_step(self, event: StepEvent) -> None:
        """Record the mean loss since the last record, and the rest of the last step."""
        self._meter.step_done()
        self._losses.append(event.result.loss)
        step = event.state.step
        self._console.advance(step)
        if step % self._every and event.ending is None:
            return
        record = self._record(step, event.result)
        self._losses = []
        self._console.update(record)
        values = {name: value for name, value in asdict(record).items() if value is not None}
        values.pop("step")
        values["consumed_samples"] = event.state.consumed_samples
        self._writer.write(step, values)

    def _record(self, step: int, result: StepResult) -> StepRecord:
        speed = self._meter.lap()
        return StepRecord(
            step=step,
            loss=sum(self._losses) / len(self._losses),
            learning_rate=result.learning_rate,
            grad_norm=result.outcome.grad_norm,
            loss_scale=result.outcome.loss_scale,
            tokens_per_second=speed.tokens_per_second,
            utilization=speed.utilization,
            hardware_utilization=speed.hardware_utilization,
            flops_per_second=speed.flops_per_second,
            matmul_flops_per_second=self._meter.matmul_rate,
            seconds_left=(self._total_steps - step) * speed.seconds_per_step,
            next_sentence_loss=None if result.pairs is None else result.pairs.loss,
            next_sentence_accuracy=None if result.pairs is None else result.pairs.accuracy,
        )


class EvaluateHook:
    """Validates every ``train.eval_every`` steps and at the end of the run.

    Args:
        every: steps between validations; 0: at the end only.
        evaluate: computes it; collective.
        meter: does not count the time.
        report: what to do with the result; None on ranks that do nothing with it.
    """

    def __init__(
        self,
        every: int,
        evaluate: Callable[[], Evaluation],
        meter: ThroughputMeter,
        report: Callable[[int, Evaluation], None] | None,
    ) -> None:
        self._every = every
        self._evaluate = evaluate
        self._meter = meter
        self._report = report

    def after_step(self, event: StepEvent) -> None:
        """Validate, if due; not when interrupted, because then there is a deadline."""
        step = event.state.step
        scheduled = self._every > 0 and step % self._every == 0 and event.ending is None
        if scheduled or event.ending is Ending.FINISHED:
            with self._meter.paused():
                evaluation = self._evaluate()
                if self._report is not None:
                    self._report(step, evaluation)


class SaveHook:
    """Saves every ``checkpoint.save_every`` steps, when asked, and at the process's last step.

    Args:
        every: steps between checkpoints; 0: at the last step only.
        save: saves and commits; collective.
        meter: does not count the time.
        ledger: flushed first, so that a checkpoint never has steps that the ledger lacks.
    """

    def __init__(
        self,
        every: int,
        save: Callable[[TrainState], Path],
        meter: ThroughputMeter,
        ledger: Ledger | None,
    ) -> None:
        self._every = every
        self._save = save
        self._meter = meter
        self._ledger = ledger

    def after_step(self, event: StepEvent) -> None:
        """Save, if due."""
        scheduled = self._every > 0 and event.state.step % self._every == 0
        if scheduled or event.save or event.ending is not None:
            with self._meter.paused():
                if self._ledger is not None:
                    self._ledger.sync()
                logger.info("saved %s", self._save(event.state))

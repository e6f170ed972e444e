"""Hooks called after each step: sample log, metrics, validation, replica checks, checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar, Protocol

from megatron_deberta.checkpoint.background import Saved, Saver
from megatron_deberta.config.schema import CheckpointConfig
from megatron_deberta.data.sample_log import SampleLog
from megatron_deberta.errors import CheckpointError
from megatron_deberta.observe.console import LiveConsole, StepRecord
from megatron_deberta.observe.metrics import MetricsWriter
from megatron_deberta.observe.progress import Section
from megatron_deberta.observe.throughput import ThroughputMeter
from megatron_deberta.train.evaluate import Evaluation
from megatron_deberta.train.selection import SCORE, Selection
from megatron_deberta.train.state import Ending, StepEvent, StepResult, TrainState

logger = logging.getLogger(__name__)


class Hook(Protocol):
    """Callback after each step; it may be collective, so every rank calls it.

    A hook that only some ranks have is of section ``AFTER``.

    Attributes:
        section: reported as this rank's progress while the hook runs.
    """

    section: ClassVar[Section]

    def after_step(self, event: StepEvent) -> bool:
        """Act on the step, if due.

        Returns:
            Whether it took so long that the caller has to look for new stop requests; the same on
            every rank.
        """
        ...

    def late_end(self, event: StepEvent) -> None:
        """Complete what ``after_step`` would have done had it known of ``event.ending``."""


@dataclass(slots=True)
class PeriodicHook:
    """Calls a function every few steps.

    Args:
        every: steps between calls.
        call: receives the event; collective, unless only some ranks have the hook.
    """

    every: int
    call: Callable[[StepEvent], None]
    section: ClassVar[Section] = Section.AFTER

    def after_step(self, event: StepEvent) -> bool:
        """Call the function, if due."""
        if event.state.step % self.every == 0:
            self.call(event)
        return False

    def late_end(self, event: StepEvent) -> None:
        """Do nothing."""


@dataclass(slots=True)
class LogHook:
    """Writes metrics and updates the console every ``log.every`` steps; rank 0 only.

    Args:
        every: steps between records; the last step of a process is always recorded.
        total_steps: last step of the run.
        meter: throughput meter.
        writer: writer of ``metrics.jsonl``.
        console: terminal view.
        segment_end: a step that is always recorded, at the end of a phase; 0: none.
        remaining_flops: returns the work after a step, where steps differ; None: they are equal.
        labels: added to every record.
    """

    every: int
    total_steps: int
    meter: ThroughputMeter
    writer: MetricsWriter
    console: LiveConsole
    segment_end: int = 0
    remaining_flops: Callable[[int], float] | None = None
    labels: Mapping[str, float] = field(default_factory=dict)
    _losses: list[float] = field(default_factory=list, init=False)
    section: ClassVar[Section] = Section.AFTER

    def after_step(self, event: StepEvent) -> bool:
        """Record the mean loss since the last record and the other metrics of this step."""
        self.meter.step_done()
        if event.result.skip in (None, "overflow"):
            self._losses.append(event.result.loss)
        step = event.state.step
        self.console.advance(step)
        if event.result.skip is not None:
            self._record_skip(step, event.result)
        if self._is_due(step) or event.ending is not None:
            self._write(event)
        return False

    def late_end(self, event: StepEvent) -> None:
        """Record the last step, unless it was due."""
        if not self._is_due(event.state.step):
            self._write(event)

    def _is_due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.segment_end

    def _write(self, event: StepEvent) -> None:
        step = event.state.step
        record = self._record(step, event.result)
        self._losses = []
        self.console.update(record)
        values = asdict(record)
        values |= values.pop("metrics")
        values.pop("step")
        values["consumed_samples"] = event.state.consumed_samples
        values |= self.labels
        self.writer.write(step, values)

    def _record_skip(self, step: int, result: StepResult) -> None:
        norm = result.outcome.grad_norm
        self.writer.write(
            step, {"skip": str(result.skip), "loss": result.loss, "grad_norm": norm}, kind="guard"
        )
        self.console.note(
            f"step {step}: no update, {result.skip} | loss {result.loss:.4f} | grad norm {norm:.3f}"
        )

    def _record(self, step: int, result: StepResult) -> StepRecord:
        speed = self.meter.lap()
        # If all updates since the last record were skipped, report the loss of this step.
        losses = self._losses or [result.loss]
        seconds_left = (self.total_steps - step) * speed.seconds_per_step
        if self.remaining_flops is not None:
            seconds_left = self.remaining_flops(step) / speed.flops_per_second
        return StepRecord(
            step=step,
            loss=sum(losses) / len(losses),
            learning_rate=result.learning_rate,
            grad_norm=result.outcome.grad_norm,
            loss_scale=result.outcome.loss_scale,
            tokens_per_second=speed.tokens_per_second,
            utilization=speed.utilization,
            hardware_utilization=speed.hardware_utilization,
            flops_per_second=speed.flops_per_second,
            matmul_flops_per_second=self.meter.matmul_rate,
            seconds_left=seconds_left,
            metrics=result.metrics,
        )


@dataclass(slots=True)
class EvaluateHook:
    """Validates every ``train.eval_every`` steps and at the end of the run.

    Args:
        every: steps between validations; 0: at the end only.
        evaluate: computes the validation metrics, None if told to stop meanwhile; collective.
        meter: paused meanwhile.
        report: called with step and result; None on ranks that do not report.
        selection: updated with each score.
        total_steps: last step of the run. A validation that is neither periodic nor of this step,
            as that of ``train.exit_step``, selects nothing and has no score in the records: the
            same run without an interruption does not have it.
    """

    every: int
    evaluate: Callable[[], Evaluation | None]
    meter: ThroughputMeter
    report: Callable[[int, Evaluation], None] | None
    selection: Selection = field(default_factory=Selection)
    total_steps: int = 0
    section: ClassVar[Section] = Section.EVALUATION

    def after_step(self, event: StepEvent) -> bool:
        """Validate, if due; not when interrupted, because time is limited then."""
        step = event.state.step
        if event.ending is Ending.FINISHED or (event.ending is None and self.is_due(step)):
            return not self.validate(step)
        return False

    def late_end(self, event: StepEvent) -> None:
        """Do nothing: the next start of the run repeats a validation that was interrupted."""

    def is_due(self, step: int) -> bool:
        """Return whether a validation is due after ``step``, unless the process ends there."""
        return self.every > 0 and step > 0 and step % self.every == 0

    def validate(self, step: int) -> bool:
        """Validate now; return whether it was completed. Collective over all ranks."""
        with self.meter.paused():
            evaluation = self.evaluate()
            if evaluation is not None and SCORE in evaluation.metrics:
                if self.is_due(step) or step == self.total_steps:
                    self.selection.update(step, evaluation.metrics[SCORE])
                else:
                    metrics = {k: v for k, v in evaluation.metrics.items() if k != SCORE}
                    evaluation = replace(evaluation, metrics=metrics)
            if evaluation is not None and self.report is not None:
                self.report(step, evaluation)
        return evaluation is not None


@dataclass(slots=True)
class SaveHook:
    """Saves every ``checkpoint.save_every`` steps, on request, and at the process's last step.

    Args:
        config: schedule and failure policy; ``asynchronous`` is not ``auto``.
        begin: starts a save of a state; if the flag is set, also completes it. Its last argument is
            ``time.monotonic()`` when training began to wait. Collective.
        saver: the saver that ``begin`` uses.
        meter: paused meanwhile.
        sample_log: flushed first, so that it contains every step of the checkpoint.
        report: called with step and committed checkpoint; None on ranks that do not report.
        selection: a new best step is saved, and is the best one when it is; None: no selection.
    """

    config: CheckpointConfig
    begin: Callable[[TrainState, bool, float], Saved | None]
    saver: Saver
    meter: ThroughputMeter
    sample_log: SampleLog | None
    report: Callable[[int, Saved], None] | None
    selection: Selection | None = None
    section: ClassVar[Section] = Section.SAVE

    def after_step(self, event: StepEvent) -> bool:
        """Save, if due, and commit a background save that has completed."""
        every, step = self.config.save_every, event.state.step
        if event.ending is Ending.PREEMPTED and self._finish(step):
            return False
        # A process that ends and a requested save wait for completion.
        now = event.save or event.ending is not None
        due = now or (every > 0 and step % every == 0)
        if not due and not self._is_candidate(step) and not self.saver.in_flight:
            return False
        try:
            is_waiting = due or self._is_candidate(step)
            with self.meter.paused() if is_waiting else nullcontext():
                self._log_saved(step, self.saver.finish() if is_waiting else self.saver.poll())
        except CheckpointError as error:
            self._continue_after(error, step, now)
        if not due and not self._is_candidate(step):
            return False
        is_saved = False
        try:
            with self.meter.paused():
                is_saved = self._save(event.state, now)
        except CheckpointError as error:
            self._continue_after(error, step + 1, now)
        # A process that was told to stop meanwhile has its checkpoint.
        return is_saved and event.ending is None

    def _is_candidate(self, step: int) -> bool:
        return self.selection is not None and self.selection.is_candidate(step)

    def _continue_after(self, error: CheckpointError, step: int, now: bool) -> None:
        """Go on without a checkpoint of a step before ``step``, or raise the error."""
        if self.config.on_failure == "stop" or now:
            raise error
        logger.error("%s; training continues without this checkpoint", error)
        self._forget(before=step)

    def _forget(self, *, before: int) -> None:
        if self.selection is not None:
            self.selection.forget(before=before)

    def late_end(self, event: StepEvent) -> None:
        """Do nothing: if the end is known after this hook, it has saved."""

    def _finish(self, step: int) -> bool:
        """Complete the background save in flight; return whether there is a new checkpoint.

        It spares a process that is to stop soon a second save.
        """
        try:
            saved = self.saver.finish()
        except CheckpointError as error:
            logger.error("%s; saving again", error)
            self._forget(before=step)
            return False
        self._log_saved(step, saved)
        return saved is not None

    def _save(self, state: TrainState, now: bool) -> bool:
        """Save, and return whether the checkpoint is complete; no save may be in flight."""
        began = time.monotonic()
        if self.sample_log is not None:
            self.sample_log.sync()
        saved = self.begin(state, now or self.config.asynchronous is not True, began)
        self._log_saved(state.step, saved)
        return saved is not None

    def _log_saved(self, step: int, saved: Saved | None) -> None:
        if saved is not None:
            logger.info("saved %s", saved.path)
            if self.selection is not None:
                self.selection.saved(saved.step)
            if self.report is not None:
                self.report(step, saved)

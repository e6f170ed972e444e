"""Callbacks of a run: sample log, metrics, timeline, validation, replica checks, checkpoints."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from megatron_deberta.checkpoint.retention import Retention
from megatron_deberta.checkpoint.saver import Saved
from megatron_deberta.config.phases import last_step, segment_at, segments
from megatron_deberta.config.schema import CheckpointConfig
from megatron_deberta.distributed.control import all_reduce_any
from megatron_deberta.errors import CheckpointError
from megatron_deberta.evaluate.minimal_pairs import MinimalPairTask
from megatron_deberta.evaluate.selection import SCORE, Selection, record_selection, select_committed
from megatron_deberta.evaluate.validation import Evaluation
from megatron_deberta.evaluate.validation_samples import FILE_NAME as SAMPLES_FILE
from megatron_deberta.evaluate.validation_samples import SampleRecorder, SampleWriter
from megatron_deberta.observe.metrics import JsonLines, RecordKind
from megatron_deberta.observe.progress import Section
from megatron_deberta.observe.timeline import Timeline
from megatron_deberta.tasks.class_scores import FILE_NAME as CLASS_SCORES_FILE
from megatron_deberta.train.data import Validator
from megatron_deberta.train.records import RunRecords
from megatron_deberta.train.state import Ending, StepResult
from megatron_deberta.train.trainer import Callback, Trainer

logger = logging.getLogger(__name__)

# Computes the metrics of a validation; None if told to stop meanwhile
Evaluate = Callable[[], Evaluation | None]


class LogSamples(Callback):
    """Appends each step's samples to the sample log."""

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Append them."""
        if trainer.sample_log is not None:
            trainer.sample_log.append(trainer.state.step, trainer.batches)


class LogMetrics(Callback):
    """Writes metrics and updates the terminal every ``log.every`` steps; rank 0 only.

    The last steps of a phase and of the process are always recorded.
    """

    def __init__(self) -> None:
        self._labels: Mapping[str, float] = {}
        # First and last step of each segment and the FLOPs of its steps, where they differ
        self._work: list[tuple[int, int, float]] = []
        self._losses: list[float] = []
        self._last: StepResult | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Choose what is added to every record of a segment."""
        self._losses = []
        segment, parts = trainer.segment, segments(trainer.config)
        if len(parts) > 1:
            last = last_step(trainer.config)
            self._work = [
                (part.first_step, min(part.end, last), trainer.data.step_work(part.config).flops)
                for part in parts
            ]
            self._labels = {
                "phase": segment.phase + 1,
                "global_batch_size": segment.config.train.global_batch_size,
                "sequence_length": segment.config.data.sequence_length,
            }

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Record the mean loss since the last record and the other metrics of this step."""
        records, step = trainer.records, trainer.state.step
        if records is None:
            return
        records.longest_step = max(records.longest_step, trainer.step_seconds)
        trainer.meter.step_done()
        if result.skip in (None, "overflow"):
            self._losses.append(result.loss)
        records.console.advance(step)
        if result.skip is not None:
            records.record_skip(step, result)
        if self._is_due(trainer) or trainer.ending is not None:
            self._write(trainer, records, result)
        self._last = result

    def on_stop(self, trainer: Trainer) -> None:
        """Record the last step, unless it was due."""
        if trainer.records is not None and self._last and not self._is_due(trainer):
            self._write(trainer, trainer.records, self._last)

    def _is_due(self, trainer: Trainer) -> bool:
        step = trainer.state.step
        is_end_of_phase = step == trainer.segment.end < trainer.config.train.steps
        return step % trainer.segment.config.log.every == 0 or is_end_of_phase

    def _write(self, trainer: Trainer, records: RunRecords, result: StepResult) -> None:
        step = trainer.state.step
        speed = trainer.meter.lap()
        # If all updates since the last record were skipped, report the loss of this step.
        losses = self._losses or [result.loss]
        seconds_left = (last_step(trainer.config) - step) * speed.seconds_per_step
        if self._work:
            flops = sum(max(0, end - max(first, step)) * each for first, end, each in self._work)
            seconds_left = flops / speed.flops_per_second
        values = {
            "loss": sum(losses) / len(losses),
            "learning_rate": result.learning_rate,
            "grad_norm": result.outcome.grad_norm,
            "loss_scale": result.outcome.loss_scale,
            "tokens_per_second": speed.tokens_per_second,
            "utilization": speed.utilization,
            "hardware_utilization": speed.hardware_utilization,
            "flops_per_second": speed.flops_per_second,
            "matmul_flops_per_second": trainer.meter.matmul_rate,
            "seconds_left": seconds_left,
        }
        labels = {"consumed_samples": trainer.state.consumed_samples, **self._labels}
        records.record_step(step, values, result.metrics, labels)
        self._losses = []


@dataclass(frozen=True)
class RecordTimeline(Callback):
    """Records time and memory every ``log.every`` steps; rank 0 only.

    Args:
        timeline: ``timeline.jsonl``.
    """

    timeline: Timeline

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Record them, if due."""
        if trainer.state.step % trainer.segment.config.log.every == 0:
            self.timeline.record(trainer.state.step)


class PeriodicEvaluation(Callback):
    """Evaluates every few steps and at the end of the run.

    Attributes:
        kind: of the record.
    """

    kind: ClassVar[RecordKind]
    section: ClassVar[Section] = Section.EVALUATION

    def every(self, trainer: Trainer) -> int | None:
        """Return the steps between evaluations; None: at the end only."""
        raise NotImplementedError

    def evaluate(self, trainer: Trainer) -> Evaluation | None:
        """Evaluate now; None: told to stop meanwhile. Collective over all ranks."""
        raise NotImplementedError

    def show(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Record and show an evaluation; called on rank 0."""
        assert trainer.records is not None
        trainer.records.report(trainer.state.step, self.kind, evaluation)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> bool:
        """Evaluate, if due; not when interrupted, because time is limited then."""
        ending = trainer.ending
        is_due = ending is Ending.FINISHED or (ending is None and self._is_due(trainer))
        return is_due and not self.run(trainer, trainer.selection)

    def run(self, trainer: Trainer, selection: Selection) -> bool:
        """Evaluate now; return whether it was completed. Collective over all ranks.

        An evaluation that is neither periodic nor of the last step, as that of
        ``train.exit_step``, selects nothing and has no score in the records: the same run without
        an interruption does not have it.

        Args:
            trainer: the trainer.
            selection: updated with the score.
        """
        step = trainer.state.step
        with trainer.meter.paused():
            evaluation = self.evaluate(trainer)
            if evaluation is None:
                return False
            if SCORE in evaluation.metrics:
                if self._is_due(trainer) or step == trainer.config.train.steps:
                    selection.update(step, evaluation.metrics[SCORE])
                else:
                    metrics = {k: v for k, v in evaluation.metrics.items() if k != SCORE}
                    evaluation = replace(evaluation, metrics=metrics)
            if trainer.records is not None:
                self.show(trainer, evaluation)
            for callback in trainer.callbacks:
                callback.on_validation(trainer, self.kind, evaluation)
        return True

    def run_if_missing(self, trainer: Trainer) -> bool:
        """Evaluate the last step if an interrupted process did not; return whether it was missing.

        Collective over all ranks.
        """
        step, selection, records = trainer.state.step, trainer.selection, trainer.records
        is_due = self._is_due(trainer) or step >= last_step(trainer.config)
        is_missing = is_due and records is not None and records.lacks(self.kind, step)
        if not (is_due and all_reduce_any(is_missing, trainer.groups)):
            return False
        if selection.best_step == step:
            # Its record was removed; the repeated validation does not count again.
            selection = Selection()
        with trainer.observer.section(Section.EVALUATION):
            self.run(trainer, selection)
        return True

    def _is_due(self, trainer: Trainer) -> bool:
        every, step = self.every(trainer), trainer.state.step
        return every is not None and step > 0 and step % every == 0


class Validate(PeriodicEvaluation):
    """Validates every ``train.eval_every`` steps."""

    kind: ClassVar[RecordKind] = "validation"

    def __init__(self) -> None:
        self._evaluate: Evaluate | None = None
        self._writer: SampleWriter | None = None
        self._classes: JsonLines | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Prepare the validation; make that of the last step if an interrupted process did not."""
        config, groups, records = trainer.segment.config, trainer.groups, trainer.records
        self._evaluate = None
        if trainer.validator is None:
            return
        module = trainer.engine.module
        recorder = SampleRecorder(module, groups, config.log.samples)
        self._evaluate = recorder.watch(self._validation(trainer, trainer.validator))
        if records is not None:
            lines = JsonLines(records.run_dir / SAMPLES_FILE, trainer.saver.fence.check)
            # Those of steps that are repeated are removed.
            lines.cut_after(records.first_step)
            path = trainer.data.identity.tokenizer_path
            self._writer = SampleWriter(lines, recorder, path)
            self._classes = JsonLines(
                records.run_dir / CLASS_SCORES_FILE, trainer.saver.fence.check
            )
            self._classes.cut_after(records.first_step)
        self._repeat_missing(trainer)

    def _repeat_missing(self, trainer: Trainer) -> None:
        """Repeat the validation of the last step, on its phase's data, if it was interrupted."""
        config, state, groups = trainer.config, trainer.state, trainer.groups
        evaluate = self._evaluate
        before, now = (segment_at(config, step) for step in (max(0, state.step - 1), state.step))
        if before.phase != now.phase:
            validator = trainer.data.validator(before.phase_config, groups)
            self._evaluate = None if validator is None else self._validation(trainer, validator)
        was_missing = self._evaluate is not None and self.run_if_missing(trainer)
        self._evaluate = evaluate
        if was_missing and config.finetune.task and config.finetune.keep_best:
            folder = None if trainer.records is None else trainer.records.run_dir
            select_committed(trainer.selection, state.step, groups, folder)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> bool:
        """Validate, if due and if the run has a validation."""
        return self._evaluate is not None and super().on_step_end(trainer, result)

    @staticmethod
    def _validation(trainer: Trainer, validator: Validator) -> Evaluate:
        module, should_abort = trainer.engine.module, trainer.requests.should_abort
        return functools.partial(validator, module, should_abort=should_abort)

    def every(self, trainer: Trainer) -> int | None:
        """Return ``train.eval_every``."""
        return trainer.segment.config.train.eval_every

    def evaluate(self, trainer: Trainer) -> Evaluation | None:
        """Validate."""
        assert self._evaluate is not None
        return self._evaluate()

    def show(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Record the metrics, the samples and the scores by class."""
        super().show(trainer, evaluation)
        assert self._writer is not None
        assert self._classes is not None
        step = trainer.state.step
        self._writer.write(step)
        if evaluation.class_scores is not None:
            self._classes.append({"step": step, **evaluation.class_scores.to_dict()})


@dataclass(frozen=True)
class EvaluateMinimalPairs(PeriodicEvaluation):
    """Evaluates minimal pairs every ``train.blimp_every`` steps.

    Args:
        task: the pairs.
    """

    task: MinimalPairTask
    kind: ClassVar[RecordKind] = "minimal_pairs"

    def on_start(self, trainer: Trainer) -> None:
        """Evaluate the last step if an interrupted process did not."""
        self.run_if_missing(trainer)

    def every(self, trainer: Trainer) -> int | None:
        """Return ``train.blimp_every``."""
        return trainer.segment.config.train.blimp_every

    def evaluate(self, trainer: Trainer) -> Evaluation | None:
        """Score all pairs."""
        module, should_abort = trainer.engine.module, trainer.requests.should_abort
        return self.task.evaluate(module, trainer.groups, should_abort)


class CheckReplicas(Callback):
    """Compares the replicas of all parameters every ``stability.replica_check_every`` steps."""

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Compare them, if due."""
        every = trainer.segment.config.stability.replica_check_every
        if every is not None and trainer.state.step % every == 0:
            trainer.check_replicas()


class SaveCheckpoints(Callback):
    """Saves every ``checkpoint.save_every`` steps, on request, and at the process's last step.

    A new best validation is saved, too, and its step is the best one when the save is committed.

    Args:
        config: schedule and failure policy; ``asynchronous`` is not ``auto``.
        keeps_best: save the best checkpoint of a fine-tuning run.
    """

    section: ClassVar[Section] = Section.SAVE

    def __init__(self, config: CheckpointConfig, *, keeps_best: bool) -> None:
        self._config = config
        self._keeps_best = keeps_best
        self._is_recorded = True

    def on_step_end(self, trainer: Trainer, result: StepResult) -> bool:
        """Save, if due, and commit a background save that has completed."""
        saver, step, ending = trainer.saver, trainer.state.step, trainer.ending
        if ending is Ending.PREEMPTED and self._finish(trainer):
            return False
        # A process that ends and a requested save wait for completion.
        now = trainer.save_requested or ending is not None
        every = self._config.save_every
        due = now or (every is not None and step % every == 0)
        if not due and not self._is_candidate(trainer) and not saver.in_flight:
            return False
        try:
            is_waiting = due or self._is_candidate(trainer)
            with trainer.meter.paused() if is_waiting else nullcontext():
                self._note(trainer, saver.finish() if is_waiting else saver.poll())
        except CheckpointError as error:
            self._continue_after(trainer, error, step, now)
        if not due and not self._is_candidate(trainer):
            return False
        is_saved = False
        try:
            with trainer.meter.paused():
                is_saved = self._save(trainer, now)
        except CheckpointError as error:
            self._continue_after(trainer, error, step + 1, now)
        # A process that was told to stop meanwhile has its checkpoint.
        return is_saved and ending is None

    def _is_candidate(self, trainer: Trainer) -> bool:
        return self._keeps_best and trainer.selection.is_candidate(trainer.state.step)

    def _continue_after(
        self, trainer: Trainer, error: CheckpointError, step: int, now: bool
    ) -> None:
        """Go on without a checkpoint of a step before ``step``, or raise the error."""
        if self._config.on_failure == "stop" or now:
            raise error
        logger.error("%s; training continues without this checkpoint", error)
        trainer.selection.forget(before=step)

    def _finish(self, trainer: Trainer) -> bool:
        """Complete the background save in flight; return whether there is a new checkpoint.

        It spares a process that is to stop soon a second save.
        """
        try:
            saved = trainer.saver.finish()
        except CheckpointError as error:
            logger.error("%s; saving again", error)
            trainer.selection.forget(before=trainer.state.step)
            return False
        self._note(trainer, saved)
        return saved is not None

    def _save(self, trainer: Trainer, now: bool) -> bool:
        """Save, and return whether the checkpoint is complete; no save may be in flight."""
        began = time.monotonic()
        if trainer.sample_log is not None:
            # Before the save, so that it contains every step of the checkpoint.
            trainer.sample_log.sync()
        metadata = trainer.checkpoint_metadata()
        checkpoint = trainer.config.checkpoint
        best = trainer.selection.best_after(trainer.state.step) if self._keeps_best else None
        retention = Retention(
            checkpoint.keep_last, checkpoint.keep_every, trainer.guard.last_good_step, best
        )
        saved = None
        if now or self._config.asynchronous is not True:
            saved = trainer.saver.save(metadata, retention, began)
        else:
            trainer.saver.start(metadata, retention, began)
        self._note(trainer, saved)
        return saved is not None

    def _note(self, trainer: Trainer, saved: Saved | None) -> None:
        """Record a committed checkpoint."""
        if saved is None:
            return
        logger.info("saved %s", saved.path)
        selection, records = trainer.selection, trainer.records
        if self._keeps_best:
            selection.saved(saved.step)
        if records is not None:
            records.record_checkpoint(trainer.state.step, saved)
            trainer.lock.record(
                "checkpoint",
                step=saved.step,
                samples=saved.consumed_samples,
                # A check of replicas may follow a step. That of a save is part of its time; adding
                # the longest one bounds those of later saves.
                save_seconds=saved.seconds + records.longest_check,
                step_seconds=records.longest_step + records.longest_check,
            )
            if self._keeps_best and (selection.best_step == saved.step or not self._is_recorded):
                self._record_best(trainer, records.run_dir)
        for callback in trainer.callbacks:
            callback.on_save(trainer, saved)

    def _record_best(self, trainer: Trainer, run_dir: Path) -> None:
        """Write ``best.json``; with ``on_failure=continue``, retry after the next save."""
        self._is_recorded = False
        try:
            record_selection(run_dir, trainer.selection)
            self._is_recorded = True
        except OSError as error:
            now = trainer.save_requested or trainer.ending is not None
            if self._config.on_failure == "stop" or now:
                raise
            logger.error("%s; training continues, and it is written after the next save", error)

"""Training of a run on one rank: its segments, the loop over steps, and the callbacks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from megatron_deberta.checkpoint.layout import CheckpointMetadata
from megatron_deberta.checkpoint.saver import Saved, Saver
from megatron_deberta.config import batch_arithmetic, config_to_dict
from megatron_deberta.config.phases import Segment, last_step, segment_at, segments
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.batch import MicroBatch
from megatron_deberta.data.sample_log import SampleLog
from megatron_deberta.distributed.control import raise_on_all_ranks
from megatron_deberta.distributed.parallelize.build import ShardedModel
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Engine
from megatron_deberta.errors import ReplicaError, refusals
from megatron_deberta.evaluate.selection import Selection, open_selection
from megatron_deberta.evaluate.validation import Evaluation
from megatron_deberta.observe.metrics import RecordKind
from megatron_deberta.observe.progress import ProgressObserver, Section
from megatron_deberta.observe.throughput import ThroughputMeter
from megatron_deberta.train.data import RunData, Validator
from megatron_deberta.train.preemption import Request, Requests, SignalRecorder
from megatron_deberta.train.prefetch import InputQueue
from megatron_deberta.train.records import RunRecords
from megatron_deberta.train.setup import build_meter
from megatron_deberta.train.stability.guard import Guard
from megatron_deberta.train.stability.replicas import check_replicas
from megatron_deberta.train.stability.rerun import RerunStep, Verdict, report_verdict
from megatron_deberta.train.stability.rollback import Rollback, rollback
from megatron_deberta.train.state import Ending, FolderLock, StepResult, TrainState
from megatron_deberta.train.step import TrainStep

logger = logging.getLogger(__name__)


class Callback:
    """Base class of what a `Trainer` calls, on every rank and in the same order.

    Methods may be collective if they are on every rank. They read the trainer's attributes.

    Attributes:
        section: reported as this rank's progress while ``on_step_end`` runs.
    """

    section: ClassVar[Section] = Section.AFTER

    def on_start(self, trainer: Trainer) -> None:
        """Called before the first step of a segment: at the start, of a phase, after a rollback."""

    def on_step_end(self, trainer: Trainer, result: StepResult) -> bool | None:
        """Called after each step; ``trainer.state`` is the position after it.

        Returns:
            True if it took so long that the trainer has to look for new requests; the same on
            every rank.
        """

    def on_stop(self, trainer: Trainer) -> None:
        """Called if it becomes known only during the callbacks of a step that it is the last."""

    def on_validation(self, trainer: Trainer, kind: RecordKind, evaluation: Evaluation) -> None:
        """Called after each validation, and after each evaluation of minimal pairs.

        Args:
            trainer: the trainer.
            kind: of the evaluation.
            evaluation: its metrics.
        """

    def on_save(self, trainer: Trainer, saved: Saved) -> None:
        """Called after a checkpoint is committed."""

    def on_rollback(self, trainer: Trainer) -> None:
        """Called before the trainer returns to an earlier checkpoint."""

    def on_end(self, trainer: Trainer) -> None:
        """Called after the last step of the process and its callbacks."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Trains a run on this rank. Its attributes are public for callbacks.

    Args:
        config: the run.
        groups: the rank grid.
        data: training and validation data.
        model: this rank's part of the model.
        engine: backward and update.
        saver: writes checkpoints.
        state: position to train from; then the position reached.
        guard: numeric guard at that position.
        callbacks: called after every step, in this order.
        signals: records signals that ask the run to stop.
        lock: of the run folder.
        observer: notified of this rank's progress.
        terminal: console to draw on.

    Attributes:
        segment: of the run, at the present position; its ``config`` is that of the phase.
        requests: to stop or to save, from all ranks.
        inputs: micro batches of the next steps.
        train_step: executes a step.
        records: metrics and terminal view, on rank 0; None elsewhere.
        sample_log: on the ranks that write one.
        validator: validates the model; None: the run has no validation.
        selection: best checkpoint so far.
        meter: throughput.
        batches: this rank's micro batches of the last step, in host memory.
        ending: why the process ends after this step; None: it does not, as far as is known.
        save_requested: a checkpoint of this step was asked for.
        step_seconds: duration of the last step on this rank.
        resources: closed at the end of the segment.
    """

    config: RunConfig
    groups: ProcessGroups
    data: RunData
    model: ShardedModel
    engine: Engine
    saver: Saver
    state: TrainState
    guard: Guard
    callbacks: Sequence[Callback]
    signals: SignalRecorder
    lock: FolderLock
    observer: ProgressObserver = field(default_factory=ProgressObserver)
    terminal: Console = field(default_factory=Console)

    segment: Segment = field(init=False)
    requests: Requests = field(init=False)
    records: RunRecords | None = field(init=False, default=None)
    sample_log: SampleLog | None = field(init=False, default=None)
    validator: Validator | None = field(init=False, default=None)
    selection: Selection = field(init=False, default_factory=Selection)
    meter: ThroughputMeter = field(init=False)
    inputs: InputQueue = field(init=False)
    train_step: TrainStep = field(init=False)
    batches: Sequence[MicroBatch] = field(init=False, default=())
    ending: Ending | None = field(init=False, default=None)
    save_requested: bool = field(init=False, default=False)
    step_seconds: float = field(init=False, default=0.0)
    resources: ExitStack = field(init=False)

    @property
    def is_finished(self) -> bool:
        """Whether the run has all of its steps, or validations no longer improve."""
        patience = self.config.finetune.patience
        has_converged = patience is not None and patience <= self.selection.num_worse
        return has_converged or self.state.step >= last_step(self.config)

    def fit(self) -> Ending:
        """Train to the end of the run or a request to stop. Collective over all ranks.

        Raises:
            NumericsError: see ``TrainStep``.
            ReplicaError: replicas of a parameter differ.
            CheckpointError: a checkpoint cannot be written.
            DataError: the data is damaged.
        """
        done: Rollback | None = None
        first_step = self.state.step
        while True:
            self.ending = None
            with ExitStack() as self.resources:
                self._open_segment(done)
                ending = self._train(first_step)
            done = None
            if ending is Ending.ROLLBACK:
                done = self._roll_back()
            elif ending is not Ending.PHASE:
                if ending in (Ending.FINISHED, Ending.STOPPED) and self.records is not None:
                    self.records.plot()
                return ending

    def _open_segment(self, done: Rollback | None) -> None:
        """Open what belongs to the segment at the present position.

        Args:
            done: the rollback that led to this position, if any.
        """
        groups, state, data = self.groups, self.state, self.data
        segment = self.segment = segment_at(self.config, state.step)
        config = segment.config
        accumulation = batch_arithmetic(config, groups.dp_size).accumulation_steps
        self.engine.set_accumulation_steps(accumulation)
        self.records = self.sample_log = None
        with raise_on_all_ranks(groups), refusals():
            loader = data.train_loader(config, groups, state.consumed_samples, segment.stage)
            self.validator = data.validator(segment.phase_config, groups)
            if groups.rank == 0:
                self.records = self.resources.enter_context(self._open_records())
                if done is not None:
                    self.records.record_rollback(done)
                data.prepare_records(self.records)
            if config.data.sample_log and groups.tp_rank == 0:
                folder = Path(config.train.run_dir) / "ledger"
                self.sample_log = SampleLog(folder, groups.dp_rank, groups.dp_size, state.step)
                self.resources.callback(self.sample_log.close)
        self.inputs = InputQueue(loader, groups.device)
        self.meter = build_meter(config, groups, data.step_work(config))
        self.requests = Requests(self.signals, config.train.run_dir, groups)
        run_dir = None if self.records is None else self.records.run_dir
        examples = data.identity.validation_fingerprint
        with refusals():
            self.selection = open_selection(config, groups, run_dir, state.step, examples)
        self.train_step = self._build_step()
        for callback in self.callbacks:
            callback.on_start(self)

    def _open_records(self) -> RunRecords:
        """Open the records of a segment on rank 0."""
        config, segment, step = self.config, self.segment, self.state.step
        if len(segments(config)) > 1:
            now = segment.config
            logger.info(
                "phase %d from step %d: %d sequences of %d tokens", segment.phase + 1, step + 1,
                now.train.global_batch_size, now.data.sequence_length,
            )  # fmt: skip
        return RunRecords(segment.phase_config, step, self.terminal, self.saver.fence, config)

    def _build_step(self) -> TrainStep:
        config = self.segment.config
        options: dict[str, Any] = {
            "engine": self.engine, "config": config, "groups": self.groups, "guard": self.guard,
            "on_progress": self.observer.mark, "requests": self.requests,
        }  # fmt: skip
        if not config.stability.rerun:
            return TrainStep(**options)

        def report(verdict: Verdict) -> None:
            report_verdict(verdict, self.groups, self.records, self.lock)

        return RerunStep(on_verdict=report, **options)

    def _train(self, first_step: int) -> Ending:
        """Train to the end of the segment or of the run, a request to stop or a rollback.

        Args:
            first_step: completed steps when the process began to train.
        """
        observer = self.observer
        if self.is_finished:
            return Ending.FINISHED
        if self.state.step == first_step:
            # A signal during start-up: there is nothing new to save.
            if ending := _requested(replace(self.requests.poll(), stop=False)):
                return ending
        while True:
            begin = time.perf_counter_ns()
            observer.enter(Section.DATA, self.state.step)
            batches = self.inputs.take()
            observer.add_times(data=time.perf_counter_ns() - begin)
            observer.enter(Section.STEP)
            result = self.train_step(self.state.step, batches, self._meanwhile)
            self.state = self.state.advanced(self.segment.config.train.global_batch_size)
            observer.add_times(forward=result.forward_time)
            if result.rollback:
                return Ending.ROLLBACK
            request = self.requests.poll()
            whole = time.perf_counter_ns() - begin
            observer.add_times(steps=1, whole=whole)
            self.batches, self.step_seconds = self.inputs.host, whole / 1e9
            is_last = self.state.step >= last_step(self.config)
            self.ending = Ending.FINISHED if is_last else _requested(request)
            self.save_requested = request.save
            self._call_callbacks(result)
            stop = request.stop or self.ending is Ending.STOPPED
            self.requests.acknowledge(replace(request, stop=stop))
            if self.ending is not None:
                for callback in self.callbacks:
                    callback.on_end(self)
                return self.ending
            if self.state.step == self.segment.end:
                return Ending.PHASE

    def _call_callbacks(self, result: StepResult) -> None:
        """Call the callbacks; meanwhile it may become known that the process ends."""
        section = Section.AFTER
        self.observer.enter(section, self.state.step)
        for callback in self.callbacks:
            if callback.section is not section:
                section = callback.section
                self.observer.enter(section)
            ending = None
            if callback.on_step_end(self, result):
                ending = _requested(self.requests.poll())
            if ending is None and self.ending is None and self.is_finished:
                ending = Ending.FINISHED
            if ending is not None:
                is_late, self.ending = self.ending is None, ending
                for each in self.callbacks if is_late else ():
                    each.on_stop(self)

    def _meanwhile(self) -> None:
        """Do what can be done while the device computes: look for requests, prefetch batches."""
        self.requests.look_for_files()
        if self.state.step + 1 < min(last_step(self.config), self.segment.end or math.inf):
            begin = time.perf_counter_ns()
            with self.observer.section(Section.DATA):
                self.inputs.fetch()
            self.observer.add_times(data=time.perf_counter_ns() - begin)

    def _roll_back(self) -> Rollback:
        """Return to the last good checkpoint."""
        with self.observer.section(Section.SAVE):
            # The save may be of a step that is rolled back; it must end before that is deleted.
            self.saver.finish()
        for callback in self.callbacks:
            callback.on_rollback(self)
        with self.observer.section(Section.STARTUP):
            self.state, guard_state, done = rollback(
                self.config, self.saver, self.state, self.guard
            )
        self.guard = Guard.of_run(self.config, guard_state)
        return done

    def check_replicas(self) -> None:
        """Compare the replicas of all parameters. Collective over all ranks.

        Raises:
            ReplicaError: they differ.
        """
        began = time.monotonic()
        specs = self.model.specs
        try:
            check_replicas(self.engine.module, specs, self.groups, self.state.step)
        except ReplicaError as error:
            if not isinstance(self.train_step, RerunStep):
                raise
            raise self.train_step.explained(error, specs) from error
        if self.records is not None:
            seconds = time.monotonic() - began
            self.records.longest_check = max(self.records.longest_check, seconds)

    def checkpoint_metadata(self) -> CheckpointMetadata:
        """Check the state and describe its checkpoint. Collective over all ranks.

        Raises:
            ReplicaError: a faulty rank has corrupted the weights.
        """
        if self.config.stability.replica_check_every:
            self.check_replicas()
        identity = self.data.identity
        return CheckpointMetadata(
            step=self.state.step,
            consumed_samples=self.state.consumed_samples,
            config=config_to_dict(self.config),
            tokenizer_fingerprint=identity.tokenizer_fingerprint,
            tokenizer_path=identity.tokenizer_path,
            data_fingerprint=identity.data_fingerprint,
            guard=asdict(self.guard.state),
        )


def _requested(request: Request) -> Ending | None:
    """Return the ending that a request asks for."""
    if request.interrupt:
        return Ending.INTERRUPTED
    if request.stop:
        return Ending.STOPPED
    return Ending.PREEMPTED if request.preempt else None

"""Training loop: load, step, log, validate, save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.observe.progress import ProgressObserver, Section
from megatron_deberta.train.hooks import Hook
from megatron_deberta.train.preemption import Request, Requests
from megatron_deberta.train.prefetch import InputQueue
from megatron_deberta.train.state import Ending, Outcome, StepEvent, TrainState
from megatron_deberta.train.step import TrainStep


def last_step(config: RunConfig) -> int:
    """Number of optimizer steps after which a run is finished."""
    return config.train.exit_step or config.train.steps


@dataclass(slots=True)
class Trainer:
    """Runs steps until the last one, a stop request or a rollback.

    Args:
        config: the run.
        state: the position to train from.
        inputs: this rank's micro batches of each step, from that position on.
        train_step: executes a step.
        hooks: called after every step, in this order.
        requests: signals and request files.
        observer: notified of this rank's progress.
        end: step at which the segment of a run with phases ends; 0: the run's last step.
        is_start: a signal before the first step ends the process without a checkpoint.
        is_finished: called after each hook: whether the run ends before its last step.
    """

    config: RunConfig
    state: TrainState
    inputs: InputQueue
    train_step: TrainStep
    hooks: Sequence[Hook]
    requests: Requests
    observer: ProgressObserver = field(default_factory=ProgressObserver)
    end: int = 0
    is_start: bool = True
    is_finished: Callable[[], bool] = lambda: False

    def run(self) -> Outcome:
        """Train. Collective over all ranks.

        Raises:
            NumericsError: see ``TrainStep``.
            CheckpointError: a checkpoint cannot be written.
            DataError: the data is damaged.
        """
        if self.state.step >= last_step(self.config) or self.is_finished():
            return Outcome(Ending.FINISHED, self.state)
        if self.is_start and (ending := _requested(replace(self.requests.poll(), stop=False))):
            # A signal during start-up: there is nothing new to save.
            return Outcome(ending, self.state)
        observer = self.observer
        while True:
            begin = time.perf_counter_ns()
            observer.enter(Section.DATA, self.state.step)
            batches = self.inputs.take()
            observer.add_times(data=time.perf_counter_ns() - begin)
            observer.enter(Section.STEP)
            result = self.train_step(self.state.step, batches.device, self._meanwhile)
            self.state = self.state.advanced(self.config.train.global_batch_size)
            observer.add_times(forward=result.forward_time)
            if result.rollback:
                return Outcome(Ending.ROLLBACK, self.state)
            request = self.requests.poll()
            whole = time.perf_counter_ns() - begin
            observer.add_times(steps=1, whole=whole)
            ending = self._ending(request)
            event = StepEvent(self.state, batches.host, result, ending, request.save, whole / 1e9)
            ending = self._call_hooks(event)
            stop = request.stop or ending is Ending.STOPPED
            self.requests.acknowledge(replace(request, stop=stop))
            if ending is not None:
                return Outcome(ending, self.state)
            if self.state.step == self.end:
                return Outcome(Ending.PHASE, self.state)

    def _call_hooks(self, event: StepEvent) -> Ending | None:
        """Call the hooks; return why the process ends, which may become known meanwhile."""
        section = Section.AFTER
        self.observer.enter(section, event.state.step)
        for hook in self.hooks:
            if hook.section is not section:
                section = hook.section
                self.observer.enter(section)
            ending = None
            if hook.after_step(event):
                ending = _requested(self.requests.poll())
            if event.ending is None and ending is None and self.is_finished():
                ending = Ending.FINISHED
            if ending is not None:
                is_late = event.ending is None
                event = replace(event, ending=ending)
                for earlier in self.hooks if is_late else ():
                    earlier.late_end(event)
        return event.ending

    def _meanwhile(self) -> None:
        """Do what can be done while the device computes: look for requests, prefetch batches."""
        self.requests.look_for_files()
        self._prefetch()

    def _prefetch(self) -> None:
        """Start copying the next step's batches to the device, if there is a next step."""
        if self.state.step + 1 < min(last_step(self.config), self.end or math.inf):
            begin = time.perf_counter_ns()
            with self.observer.section(Section.DATA):
                self.inputs.fetch()
            self.observer.add_times(data=time.perf_counter_ns() - begin)

    def _ending(self, request: Request) -> Ending | None:
        if self.state.step >= last_step(self.config):
            return Ending.FINISHED
        return _requested(request)


def _requested(request: Request) -> Ending | None:
    """Return the ending that a request asks for."""
    if request.interrupt:
        return Ending.INTERRUPTED
    if request.stop:
        return Ending.STOPPED
    return Ending.PREEMPTED if request.preempt else None

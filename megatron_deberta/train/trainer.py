"""The loop: load, step, log, validate, save.

Owns the order and the ways to end. Refuses side effects: they are in ``hooks.py``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron_deberta.cluster.watchdog.heartbeat import Heartbeat, Section
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE
from megatron_deberta.train.hooks import Hook
from megatron_deberta.train.preemption import Asked, Requests
from megatron_deberta.train.prefetch import InputQueue
from megatron_deberta.train.state import Ending, StepEvent, TrainState
from megatron_deberta.train.step import TrainStep


def last_step(config: RunConfig) -> int:
    """Optimizer steps after which a run is finished."""
    return config.train.exit_step or config.train.steps


class Trainer:
    """Runs steps until the last one or until asked to stop.

    Args:
        config: the run.
        state: where the run is.
        inputs: gives this rank's micro batches of a step, from that state on.
        train_step: takes a step.
        hooks: told of every step, in this order.
        requests: finds out what is asked from outside.
        heartbeat: shown where this rank is.
    """

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        inputs: InputQueue,
        train_step: TrainStep,
        hooks: Sequence[Hook],
        requests: Requests,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._config = config
        self._state = state
        self._inputs = inputs
        self._train_step = train_step
        self._hooks = hooks
        self._requests = requests
        self._heartbeat = heartbeat or Heartbeat()

    def run(self) -> int | TrainState:
        """Train. Collective over all ranks.

        Returns:
            The exit code: done, or interrupted by a signal with a committed checkpoint. Or where
            the run is when it has to go back to a checkpoint.

        Raises:
            NumericsError: see ``TrainStep``.
            CheckpointError: a checkpoint cannot be written.
            DataError: the data is damaged.
        """
        if self._state.step >= last_step(self._config):
            return EXIT_DONE
        while True:
            begin = time.perf_counter_ns()
            self._heartbeat.enter(Section.DATA, self._state.step)
            batches = self._inputs.take()
            self._heartbeat.add_times(data=time.perf_counter_ns() - begin)
            self._heartbeat.enter(Section.STEP)
            result = self._train_step(self._state.step, batches.device, self._fetch_next)
            self._state = self._state.advanced(self._config.train.global_batch_size)
            if result.rollback:
                return self._state
            asked = self._requests.agree()
            self._heartbeat.add_times(steps=1, whole=time.perf_counter_ns() - begin)
            self._heartbeat.enter(Section.AFTER, self._state.step)
            event = StepEvent(self._state, batches.host, result, self._ending(asked), asked.save)
            for hook in self._hooks:
                hook.after_step(event)
            self._requests.answered(asked)
            if event.ending is not None:
                return EXIT_REQUEUE if event.ending is Ending.INTERRUPTED else EXIT_DONE

    def _fetch_next(self) -> None:
        """Have the next step's batches copied while this one runs; the last step has no next."""
        if self._state.step + 1 < last_step(self._config):
            begin = time.perf_counter_ns()
            with self._heartbeat.section(Section.DATA):
                self._inputs.fetch()
            self._heartbeat.add_times(data=time.perf_counter_ns() - begin)

    def _ending(self, asked: Asked) -> Ending | None:
        if self._state.step >= last_step(self._config):
            return Ending.FINISHED
        if asked.stop:
            return Ending.STOPPED
        return Ending.INTERRUPTED if asked.interrupt else None

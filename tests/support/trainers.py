"""Trainers without data, engine and files, for tests of the loop and of callbacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from megatron_deberta.config.phases import segment_at
from megatron_deberta.config.schema import RunConfig, TrainConfig
from megatron_deberta.data.batch import MicroBatch
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.base import StepOutcome
from megatron_deberta.evaluate.selection import Selection
from megatron_deberta.observe.throughput import StepWork, ThroughputMeter
from megatron_deberta.train.prefetch import InputQueue
from megatron_deberta.train.stability.guard import Guard
from megatron_deberta.train.state import Ending, StepResult, TrainState
from megatron_deberta.train.trainer import Callback, Trainer

CPU = torch.device("cpu")


def step_result(loss: float = 2.0) -> StepResult:
    """Return the result of a step."""
    return StepResult(loss, 1e-3, StepOutcome(0.5, False, 1.0))


def meter() -> ThroughputMeter:
    """Return a meter of steps of 8 tokens."""
    return ThroughputMeter(work=StepWork(8, 1.0), matmul_rate=1.0)


class LoopTrainer(Trainer):
    """A trainer of given steps.

    Args:
        config: the run.
        state: position to train from.
        loader: yields the micro batches of each step.
        step: called as a ``TrainStep``.
        callbacks: called after each step.
        requests: stands for ``Requests``.
        saver: stands for ``Saver``.
        streams: as of ``InputQueue``.
    """

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        loader: Iterable[Sequence[MicroBatch]],
        step: Any,
        callbacks: Sequence[Callback],
        requests: Any,
        saver: Any = None,
        streams: Any = None,
    ) -> None:
        nothing: Any = None
        lock: Any = SimpleNamespace(record=lambda *_, **__: None)
        super().__init__(
            config=config, groups=single_process_groups(CPU), data=nothing, model=nothing,
            engine=nothing, saver=saver, state=state, guard=Guard.of_run(config),
            callbacks=callbacks, signals=nothing, lock=lock,
        )  # fmt: skip
        self._given = (loader, step, requests, streams)

    def _open_segment(self, done: Any) -> None:
        loader, self.train_step, self.requests, streams = self._given
        self.segment = segment_at(self.config, self.state.step)
        self.inputs = InputQueue(loader, CPU, streams)
        self.meter = meter()
        for callback in self.callbacks:
            callback.on_start(self)


def trainer_at(step: int, ending: Ending | None = None, **attributes: Any) -> Any:
    """Return a stand-in for a trainer after a step.

    Args:
        step: completed steps, of 4 samples each.
        ending: why the process ends after it.
        attributes: further attributes of the trainer.
    """
    config = attributes.setdefault(
        "config", RunConfig(train=TrainConfig(steps=9, global_batch_size=4))
    )
    defaults = {
        "state": TrainState(step, 4 * step),
        "segment": segment_at(config, max(0, step - 1)),
        "ending": ending,
        "records": None,
        "sample_log": None,
        "selection": Selection(),
        "meter": meter(),
        "guard": Guard.of_run(config),
        "callbacks": (),
        "save_requested": False,
        "step_seconds": 0.1,
        "checkpoint_metadata": lambda: SimpleNamespace(step=step),
    }
    return SimpleNamespace(**{**defaults, **attributes})

"""Batches are copied one step ahead, read in order, and a stop loses none of them.

Without a GPU its streams are stand-ins that write down what is asked of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron_deberta.config.schema import RunConfig, TrainConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.errors import DataError
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.train.prefetch import InputQueue
from megatron_deberta.train.state import Ending, StepResult, TrainState
from megatron_deberta.train.trainer import Callback, Trainer
from tests.support.trainers import LoopTrainer, step_result
from tests.unit.train.test_trainer import PREEMPT, OneRequest

CPU = torch.device("cpu")
CONFIG = RunConfig(train=TrainConfig(steps=7, global_batch_size=2))


class FakeStreams:
    """What ``InputQueue`` uses of ``torch.cuda``; ``log`` has what happened, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "compute"

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        return FakeStream("side", self.log)

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self.now, self.log)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.now = stream.name
        yield
        self.now = "compute"


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        self.log.append(f"{self.name} marks")
        return f"{self.name}'s mark"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    """Fake streams that also note copies and their release."""
    fake = FakeStreams()
    move = Batch.to

    def to(batch: Batch, device: Any, non_blocking: bool = False) -> Batch:
        assert non_blocking == (fake.now == "side")
        fake.log.append(f"{fake.now} copies {int(batch.sample_index[0])}")
        return move(batch, device, non_blocking)

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        fake.log.append(f"kept for {stream.name}")

    monkeypatch.setattr(Batch, "to", to)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return fake


def batch(sample: int) -> Batch:
    generator = torch.Generator().manual_seed(sample)
    ids = torch.randint(100, (1, 8), generator=generator)
    return Batch(ModelInputs(ids), ids[:, :2], ids[:, 2:4], torch.tensor([sample]))


def loader(first: int, log: list[str]) -> Iterator[list[Batch]]:
    """Two micro batches a step, from a sample on."""
    while True:
        log.append(f"loads {first}")
        yield [batch(first), batch(first + 1)]
        first += 2


def test_a_step_is_copied_beside_the_one_that_runs_and_handed_over(streams: FakeStreams) -> None:
    queue = InputQueue(loader(0, streams.log), CPU, streams)
    assert streams.log == []
    queue.take()
    kept = ["kept for compute"] * 8  # four tensors a micro batch
    first = ["loads 0", "side copies 0", "side copies 1", "side marks"]
    assert streams.log == [*first, "compute waits for side's mark", *kept]
    streams.log.clear()
    queue.fetch()
    queue.fetch()  # one step ahead, never two
    assert streams.log == ["loads 2", "side copies 2", "side copies 3", "side marks"]
    streams.log.clear()
    taken = queue.take()
    assert streams.log == ["compute waits for side's mark", *kept]
    assert [int(part.sample_index[0]) for part in taken] == [2, 3]


def test_batches_are_on_the_device_and_stay_on_the_host(streams: FakeStreams) -> None:
    queue = InputQueue(loader(0, []), torch.device("meta"), streams)
    assert {part.inputs.input_ids.device.type for part in queue.take()} == {"meta"}
    assert [part.sample_index.item() for part in queue.host] == [0, 1]


def test_without_a_device_nothing_is_ahead() -> None:
    log: list[str] = []
    queue = InputQueue(loader(0, log), CPU)
    queue.fetch()
    assert log == []
    queue.take()
    queue.fetch()
    assert log == ["loads 0"]


class Run(Callback):
    """Trains from a state on; ``trained`` has the input ids in order."""

    def __init__(self, state: TrainState, streams: FakeStreams | None, signal_at: int = 0) -> None:
        self.trained: list[torch.Tensor] = []
        self.log: list[str] = []
        self.ahead: list[int] = []
        self.samples: list[list[int]] = []
        self.state = state
        self.first = state.consumed_samples
        steps = loader(state.consumed_samples, self.log)
        self.trainer = LoopTrainer(
            CONFIG, state, steps, self.step, [self], OneRequest(signal_at, PREEMPT), streams=streams
        )

    def step(self, number: int, batches: list[Batch], while_busy: Any) -> StepResult:
        self.trained += [part.inputs.input_ids for part in batches]
        while_busy()
        self.ahead.append(len(self.log) - (number + 1 - self.first // 2))
        return step_result()

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self.samples.append([int(part.sample_index) for part in trainer.batches])
        self.state = trainer.state


def unbroken() -> list[torch.Tensor]:
    run = Run(TrainState(0, 0), None)
    run.trainer.fit()
    return run.trained


@pytest.mark.parametrize("signal_at", [0, 1, 3, 6])
def test_a_stop_leaves_what_is_ahead_to_the_next_start(
    streams: FakeStreams, signal_at: int
) -> None:
    run = Run(TrainState(0, 0), streams, signal_at)
    ending = run.trainer.fit()
    # One step ahead in every step but the last of the run, where there is no next one.
    assert run.ahead == [1] * min(6, signal_at or 7) + [0] * (signal_at == 0)
    trained = run.trained
    if signal_at:
        assert ending is Ending.PREEMPTED
        assert run.state == TrainState(signal_at, 2 * signal_at)
        rest = Run(run.state, streams)
        rest.trainer.fit()
        trained += rest.trained
    for one, other in zip(trained, unbroken(), strict=True):
        assert torch.equal(one, other)


def test_callbacks_see_the_batches_of_their_step(streams: FakeStreams) -> None:
    run = Run(TrainState(0, 0), streams)
    run.trainer.fit()
    assert run.samples == [[2 * step, 2 * step + 1] for step in range(7)]


def test_a_step_is_not_lost_to_what_happens_to_the_one_ahead(streams: FakeStreams) -> None:
    def damaged() -> Iterator[list[Batch]]:
        yield [batch(0)]
        yield [batch(1)]
        raise DataError("shard.bin is damaged")

    run = Run(TrainState(0, 0), streams)
    trainer = LoopTrainer(
        CONFIG, run.state, damaged(), run.step, [run], OneRequest(0, PREEMPT), streams=streams
    )
    with pytest.raises(DataError, match="damaged"):
        trainer.fit()
    assert run.state == TrainState(2, 4)

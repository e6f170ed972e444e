"""The loop's order and endings, and what callbacks see."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_deberta.checkpoint.saver import Saved
from megatron_deberta.config.schema import CheckpointConfig, RunConfig, TrainConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.errors import CheckpointError
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.train.callbacks import LogMetrics, SaveCheckpoints
from megatron_deberta.train.preemption import Request
from megatron_deberta.train.state import Ending, StepResult, TrainState
from megatron_deberta.train.trainer import Callback, Trainer
from tests.support.trainers import LoopTrainer, step_result
from tests.unit.train.test_callbacks import FakeSaver, Pairs, Written

PREEMPT = Request(preempt=True)
CONFIG = RunConfig(train=TrainConfig(steps=6, global_batch_size=4))


class OneRequest:
    """Something that is asked for during a step; 0: never."""

    def __init__(self, at: int, asked: Request) -> None:
        # The first poll comes before the first step.
        self.left, self.asked = at + 1 if at else 0, asked
        self.answers: list[Request] = []

    def look_for_files(self) -> None:
        pass

    def poll(self) -> Request:
        self.left -= 1
        return self.asked if self.left == 0 else Request()

    def acknowledge(self, asked: Request) -> None:
        self.answers.append(asked)


@dataclass(frozen=True)
class Seen:
    """What a callback has seen after a step."""

    state: TrainState
    loss: float
    ending: Ending | None
    save: bool
    seconds: float


class Recorder(Callback):
    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.ends: list[int] = []

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        ending, save = trainer.ending, trainer.save_requested
        self.seen.append(Seen(trainer.state, result.loss, ending, save, trainer.step_seconds))

    def on_stop(self, trainer: Trainer) -> None:
        raise AssertionError("the end was known")

    def on_end(self, trainer: Trainer) -> None:
        self.ends.append(trainer.state.step)


def batch(sample: int) -> Batch:
    tensor = torch.tensor([sample])
    return Batch(ModelInputs(tensor), tensor, tensor, tensor)


def run(
    config: RunConfig, state: TrainState, at: int = 0, asked: Request = PREEMPT
) -> tuple[Ending, list[Seen]]:
    def step(number: int, batches: Any, while_busy: Any) -> StepResult:
        assert [batch.sample_index.item() for batch in batches] == [number - state.step]
        while_busy()
        return step_result(float(number))

    loader = ([batch(number)] for number in itertools.count())
    recorder, requests = Recorder(), OneRequest(at, asked)
    ending = LoopTrainer(config, state, loader, step, [recorder], requests).fit()
    assert len(requests.answers) == len(recorder.seen)
    assert recorder.ends == [seen.state.step for seen in recorder.seen[-1:]]
    return ending, recorder.seen


def test_runs_to_the_last_step() -> None:
    ending, seen = run(CONFIG, TrainState(0, 0))
    assert ending is Ending.FINISHED
    assert [one.state for one in seen] == [TrainState(n, 4 * n) for n in range(1, 7)]
    assert [one.ending for one in seen] == [None] * 5 + [Ending.FINISHED]
    assert [one.loss for one in seen] == [0, 1, 2, 3, 4, 5]
    assert all(one.seconds > 0 for one in seen)


def test_resumes_where_it_was_and_stops_after() -> None:
    config = replace(CONFIG, train=replace(CONFIG.train, exit_step=4))
    ending, seen = run(config, TrainState(3, 12))
    assert ending is Ending.FINISHED
    assert [one.state for one in seen] == [TrainState(4, 16)]
    assert run(config, TrainState(4, 16)) == (Ending.FINISHED, [])
    assert run(CONFIG, TrainState(6, 24)) == (Ending.FINISHED, [])


def test_a_signal_ends_after_the_step_it_came_in() -> None:
    ending, seen = run(CONFIG, TrainState(0, 0), at=2)
    assert ending is Ending.PREEMPTED
    assert [one.ending for one in seen] == [None, Ending.PREEMPTED]
    # Ctrl-C comes first, so that nothing starts the run again.
    asked = Request(preempt=True, interrupt=True, stop=True)
    ending, seen = run(CONFIG, TrainState(0, 0), at=2, asked=asked)
    assert ending is Ending.INTERRUPTED
    assert [one.ending for one in seen] == [None, Ending.INTERRUPTED]


def test_a_signal_during_start_up_ends_before_the_first_step() -> None:
    requests, state = OneRequest(0, PREEMPT), TrainState(2, 8)
    requests.left = 1
    trainer = LoopTrainer(CONFIG, state, [], None, [], requests)
    assert trainer.fit() is Ending.PREEMPTED
    assert trainer.state == state


def test_a_signal_in_the_last_step_is_the_end() -> None:
    ending, seen = run(CONFIG, TrainState(0, 0), at=6)
    assert ending is Ending.FINISHED
    assert seen[-1].ending is Ending.FINISHED


def test_a_stop_file_ends_the_run_and_a_save_file_does_not() -> None:
    ending, seen = run(CONFIG, TrainState(0, 0), at=3, asked=Request(stop=True, preempt=True))
    assert ending is Ending.STOPPED
    assert [one.ending for one in seen] == [None, None, Ending.STOPPED]
    ending, seen = run(CONFIG, TrainState(0, 0), at=3, asked=Request(save=True))
    assert ending is Ending.FINISHED
    assert [one.save for one in seen] == [False, False, True, False, False, False]
    assert seen[-1].ending is Ending.FINISHED


def train(
    callbacks: list[Callback],
    request: Request,
    arrived: Callable[[], bool],
    saver: Any = None,
    records: Any = None,
) -> tuple[Ending, TrainState, list[Request]]:
    """Train two steps with a request that arrives in a callback."""
    answers: list[Request] = []

    def poll() -> Request:
        return request if arrived() else Request()

    requests: Any = SimpleNamespace(
        poll=poll, acknowledge=answers.append, look_for_files=lambda: None
    )
    loader = ([batch(number)] for number in itertools.count())
    train = replace(CONFIG.train, exit_step=2)
    config = replace(CONFIG, train=train, log=replace(CONFIG.log, every=5))
    trainer = LoopTrainer(
        config, TrainState(0, 0), loader, lambda *_: step_result(), callbacks, requests, saver
    )
    trainer.checkpoint_metadata = lambda: SimpleNamespace(step=trainer.state.step)  # type: ignore[method-assign, assignment, return-value]
    trainer.records = records
    return trainer.fit(), trainer.state, answers


@pytest.mark.parametrize(
    ("request_", "ending"),
    [
        (PREEMPT, Ending.PREEMPTED),
        (Request(interrupt=True), Ending.INTERRUPTED),
        (Request(stop=True), Ending.STOPPED),
    ],
)
def test_save_during_which_a_signal_arrives_is_the_last(request_: Request, ending: Ending) -> None:
    saver, written = FakeSaver(), Written()
    save = SaveCheckpoints(CheckpointConfig(save_every=1), keeps_best=False)
    found, state, answers = train(
        [LogMetrics(), save], request_, lambda: bool(saver.calls), saver, written.records_of_run()
    )
    assert (found, state) == (ending, TrainState(1, 4))
    assert saver.calls == ["save 1"]
    assert [request.stop for request in answers] == [request_.stop]
    # The last step of a process is always recorded.
    assert [step for step, _ in written.records] == [1]


def test_failed_save_during_which_a_signal_arrives_is_not_the_last() -> None:
    saver = FakeSaver(fails=True)
    config = CheckpointConfig(save_every=1, on_failure="continue")
    save = SaveCheckpoints(config, keeps_best=False)
    with pytest.raises(CheckpointError):
        train([save], PREEMPT, lambda: bool(saver.calls), saver)
    assert saver.calls == ["save 1", "save 2"]


@pytest.mark.parametrize("every", [1, 2])
def test_interrupted_validation_ends_with_a_save(every: int) -> None:
    """Also that of the last step, which the next start repeats."""
    saver, pairs = FakeSaver(), Pairs(every, [None])
    save = SaveCheckpoints(CheckpointConfig(save_every=0), keeps_best=False)
    ending, state, _ = train([pairs, save], PREEMPT, lambda: not pairs.results, saver)
    assert (ending, state) == (Ending.PREEMPTED, TrainState(every, 4 * every))
    assert saver.calls == [f"save {every}"]


def test_callbacks_are_told_of_saves() -> None:
    told: list[int] = []

    class Told(Callback):
        def on_save(self, trainer: Trainer, saved: Saved) -> None:
            told.append(saved.step)

    save = SaveCheckpoints(CheckpointConfig(save_every=1), keeps_best=False)
    train([Told(), save], PREEMPT, lambda: False, FakeSaver())
    assert told == [1, 2]

"""The loop's order and endings, and when hooks are due."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_deberta.checkpoint.background import Saved
from megatron_deberta.config.schema import CheckpointConfig, RunConfig, TrainConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.engine.base import StepOutcome
from megatron_deberta.errors import CheckpointError
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.observe.progress import Section
from megatron_deberta.observe.throughput import StepWork, ThroughputMeter
from megatron_deberta.train.evaluate import Evaluation
from megatron_deberta.train.hooks import EvaluateHook, LogHook, SaveHook
from megatron_deberta.train.preemption import Request
from megatron_deberta.train.prefetch import InputQueue
from megatron_deberta.train.selection import SCORE, Selection
from megatron_deberta.train.state import Ending, Outcome, StepEvent, StepResult, TrainState
from megatron_deberta.train.trainer import Trainer

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


class Recorder:
    section = Section.AFTER

    def __init__(self) -> None:
        self.events: list[StepEvent] = []

    def after_step(self, event: StepEvent) -> bool:
        self.events.append(event)
        return False

    def late_end(self, event: StepEvent) -> None:
        raise AssertionError("the end was known")


def batch(sample: int) -> Batch:
    tensor = torch.tensor([sample])
    return Batch(ModelInputs(tensor), tensor, tensor, tensor)


def result(loss: float = 2.0) -> StepResult:
    return StepResult(loss, 1e-3, StepOutcome(0.5, False, 1.0))


def run(
    config: RunConfig, state: TrainState, at: int = 0, asked: Request = PREEMPT
) -> tuple[Ending, list[StepEvent]]:
    def step(number: int, batches: Any, while_busy: Any) -> StepResult:
        assert [batch.sample_index.item() for batch in batches] == [number - state.step]
        while_busy()
        return result(float(number))

    loader = ([batch(number)] for number in itertools.count())
    inputs = InputQueue(loader, torch.device("cpu"))
    recorder, requests, taken = Recorder(), OneRequest(at, asked), step
    trainer: Any = Trainer(config, state, inputs, taken, [recorder], requests)  # type: ignore[arg-type]
    outcome = trainer.run()
    assert len(requests.answers) == len(recorder.events)
    return outcome.ending, recorder.events


def test_runs_to_the_last_step() -> None:
    ending, events = run(CONFIG, TrainState(0, 0))
    assert ending is Ending.FINISHED
    assert [event.state for event in events] == [TrainState(n, 4 * n) for n in range(1, 7)]
    assert [event.ending for event in events] == [None] * 5 + [Ending.FINISHED]
    assert [event.result.loss for event in events] == [0, 1, 2, 3, 4, 5]
    assert all(event.seconds > 0 for event in events)


def test_resumes_where_it_was_and_stops_after() -> None:
    config = replace(CONFIG, train=replace(CONFIG.train, exit_step=4))
    ending, events = run(config, TrainState(3, 12))
    assert ending is Ending.FINISHED
    assert [event.state for event in events] == [TrainState(4, 16)]
    assert run(config, TrainState(4, 16)) == (Ending.FINISHED, [])
    assert run(CONFIG, TrainState(6, 24)) == (Ending.FINISHED, [])


def test_a_signal_ends_after_the_step_it_came_in() -> None:
    ending, events = run(CONFIG, TrainState(0, 0), at=2)
    assert ending is Ending.PREEMPTED
    assert [event.ending for event in events] == [None, Ending.PREEMPTED]
    # Ctrl-C comes first, so that nothing starts the run again.
    asked = Request(preempt=True, interrupt=True, stop=True)
    ending, events = run(CONFIG, TrainState(0, 0), at=2, asked=asked)
    assert ending is Ending.INTERRUPTED
    assert [event.ending for event in events] == [None, Ending.INTERRUPTED]


def test_a_signal_during_start_up_ends_before_the_first_step() -> None:
    requests = OneRequest(0, PREEMPT)
    requests.left = 1
    nothing: Any = None
    typed: Any = requests
    trainer = Trainer(CONFIG, TrainState(2, 8), nothing, nothing, [], typed)
    assert trainer.run() == Outcome(Ending.PREEMPTED, TrainState(2, 8))


def test_a_signal_in_the_last_step_is_the_end() -> None:
    ending, events = run(CONFIG, TrainState(0, 0), at=6)
    assert ending is Ending.FINISHED
    assert events[-1].ending is Ending.FINISHED


def test_a_stop_file_ends_the_run_and_a_save_file_does_not() -> None:
    ending, events = run(CONFIG, TrainState(0, 0), at=3, asked=Request(stop=True, preempt=True))
    assert ending is Ending.STOPPED
    assert [event.ending for event in events] == [None, None, Ending.STOPPED]
    ending, events = run(CONFIG, TrainState(0, 0), at=3, asked=Request(save=True))
    assert ending is Ending.FINISHED
    assert [event.save for event in events] == [False, False, True, False, False, False]
    assert events[-1].ending is Ending.FINISHED


def meter() -> ThroughputMeter:
    return ThroughputMeter(work=StepWork(8, 1.0), matmul_rate=1.0)


def event(step: int, ending: Ending | None = None, loss: float = 2.0) -> StepEvent:
    return StepEvent(TrainState(step, 4 * step), [], result(loss), ending)


class FakeSaver:
    """Notes what is asked of it; a save in the background is done after two polls."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.left = 0
        self.step = 0
        self.began = 0.0
        self.fails = fails
        self.fails_to_commit = False

    @property
    def in_flight(self) -> bool:
        return bool(self.step)

    def begin(self, state: TrainState, wait: bool, began: float) -> Saved | None:
        assert not self.left
        self.began = began
        self.calls.append(f"{'save' if wait else 'start'} {state.step}")
        if self.fails:
            raise CheckpointError("the disk is full")
        self.step, self.left = state.step, 0 if wait else 2
        return self._saved() if wait else None

    def poll(self) -> Saved | None:
        self.left -= self.left > 0
        return self._commit() if self.left == 0 else None

    def finish(self) -> Saved | None:
        self.left = 0
        if self.step and self.fails_to_commit:
            self.fails_to_commit, self.step = False, 0
            raise CheckpointError("the disk is full")
        return self._commit()

    def _commit(self) -> Saved | None:
        if not self.step:
            return None
        self.calls.append(f"commit {self.step}")
        return self._saved()

    def _saved(self) -> Saved:
        saved, self.step = Saved(Path(), self.step, 1.0, 0.5), 0
        return saved


def saves(config: CheckpointConfig, saver: FakeSaver, events: list[StepEvent]) -> list[int]:
    """Steps whose checkpoint was reported."""
    told: list[int] = []
    hook = SaveHook(
        config,
        saver.begin,
        saver,
        meter(),
        None,
        lambda _, saved: told.append(saved.step),  # type: ignore[arg-type]
    )
    for one in events:
        hook.after_step(one)
    return told


@pytest.mark.parametrize(
    ("every", "saved"), [(2, [2, 4, 5]), (5, [5]), (0, [5]), (1, [1, 2, 3, 4, 5])]
)
def test_saves_when_due_and_once_at_the_end(every: int, saved: list[int]) -> None:
    events = [event(step) for step in range(1, 5)]
    events.append(event(5, Ending.PREEMPTED))
    assert saves(CheckpointConfig(save_every=every), FakeSaver(), events) == saved
    asked = replace(event(7), save=True)
    assert saves(CheckpointConfig(save_every=every + 8), FakeSaver(), [asked]) == [7]


def test_in_the_background_the_next_save_and_the_end_wait_for_the_one_before() -> None:
    saver, config = FakeSaver(), CheckpointConfig(save_every=3, asynchronous=True)
    events = [event(step) for step in range(1, 8)]
    assert saves(config, saver, [*events, event(8, Ending.INTERRUPTED)]) == [3, 6, 8]
    assert saver.calls == ["start 3", "commit 3", "start 6", "commit 6", "save 8"]
    saver, config = FakeSaver(), CheckpointConfig(save_every=1, asynchronous=True)
    assert saves(config, saver, [event(1), event(2), event(3, Ending.FINISHED)]) == [1, 2, 3]
    assert saver.calls == ["start 1", "commit 1", "start 2", "commit 2", "save 3"]
    saver = FakeSaver()
    assert saves(config, saver, [replace(event(1), save=True)]) == [1]
    assert saver.calls == ["save 1"]


def test_a_failed_save_ends_the_run_or_not_but_always_one_that_was_asked_for() -> None:
    events = [event(step) for step in range(1, 4)]
    with pytest.raises(CheckpointError):
        saves(CheckpointConfig(save_every=2), FakeSaver(fails=True), events)
    config, saver = CheckpointConfig(save_every=1, on_failure="continue"), FakeSaver(fails=True)
    assert saves(config, saver, events) == []
    assert saver.calls == ["save 1", "save 2", "save 3"]
    with pytest.raises(CheckpointError):
        saves(config, saver, [event(4, Ending.PREEMPTED)])


def test_preempted_process_completes_the_save_in_flight_and_makes_no_second_one() -> None:
    saver, config = FakeSaver(), CheckpointConfig(save_every=3, asynchronous=True)
    steps = [event(1), event(2), event(3), event(4, Ending.PREEMPTED)]
    assert saves(config, saver, steps) == [3]
    assert saver.calls == ["start 3", "commit 3"]
    # Without a deadline the last step is saved, too.
    for ending in (Ending.INTERRUPTED, Ending.STOPPED, Ending.FINISHED):
        saver = FakeSaver()
        assert saves(config, saver, [*steps[:3], event(4, ending)]) == [3, 4]
    saver = FakeSaver()
    saver.fails_to_commit = True
    assert saves(config, saver, steps) == [4]
    assert saver.calls == ["start 3", "save 4"]


def train(
    hooks: list[Any], request: Request, arrived: Callable[[], bool]
) -> tuple[Outcome, list[Request]]:
    """Train two steps with a request that arrives in a hook."""
    answers: list[Request] = []

    def poll() -> Request:
        return request if arrived() else Request()

    requests: Any = SimpleNamespace(poll=poll, acknowledge=answers.append)
    loader = ([batch(number)] for number in itertools.count())
    config = replace(CONFIG, train=replace(CONFIG.train, exit_step=2))
    step: Any = lambda *_: result()  # noqa: E731
    inputs = InputQueue(loader, torch.device("cpu"))
    return Trainer(config, TrainState(0, 0), inputs, step, hooks, requests).run(), answers


@pytest.mark.parametrize(
    ("request_", "ending"),
    [
        (PREEMPT, Ending.PREEMPTED),
        (Request(interrupt=True), Ending.INTERRUPTED),
        (Request(stop=True), Ending.STOPPED),
    ],
)
def test_save_during_which_a_signal_arrives_is_the_last(request_: Request, ending: Ending) -> None:
    saver: Any = FakeSaver()
    written: Any = Written()
    config = CheckpointConfig(save_every=1)
    hooks = [
        LogHook(5, 9, meter(), written, written),
        SaveHook(config, saver.begin, saver, meter(), None, None),
    ]
    outcome, answers = train(hooks, request_, lambda: bool(saver.calls))
    assert outcome == Outcome(ending, TrainState(1, 4))
    assert saver.calls == ["save 1"]
    assert [request.stop for request in answers] == [request_.stop]
    # The last step of a process is always recorded.
    assert [step for step, _ in written.records] == [1]


def test_failed_save_during_which_a_signal_arrives_is_not_the_last() -> None:
    saver: Any = FakeSaver(fails=True)
    config = CheckpointConfig(save_every=1, on_failure="continue")
    hook = SaveHook(config, saver.begin, saver, meter(), None, None)
    with pytest.raises(CheckpointError):
        train([hook], PREEMPT, lambda: bool(saver.calls))
    assert saver.calls == ["save 1", "save 2"]


@pytest.mark.parametrize("every", [1, 2])
def test_interrupted_validation_ends_with_a_save(every: int) -> None:
    """Also that of the last step, which the next start repeats."""
    saver: Any = FakeSaver()
    reports: list[Any] = []
    asked: list[int] = []

    def evaluate() -> None:
        asked.append(1)

    hooks = [
        EvaluateHook(every, evaluate, meter(), lambda *report: reports.append(report)),
        SaveHook(CheckpointConfig(save_every=0), saver.begin, saver, meter(), None, None),
    ]
    outcome, _ = train(hooks, PREEMPT, lambda: bool(asked))
    assert outcome == Outcome(Ending.PREEMPTED, TrainState(every, 4 * every))
    assert (saver.calls, reports) == ([f"save {every}"], [])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_only_a_saved_checkpoint_becomes_the_best(asynchronous: bool) -> None:
    """With ``on_failure=continue``, the best one stays the best if a better one is not saved."""
    saver: Any = FakeSaver()
    selection = Selection()
    config = CheckpointConfig(save_every=0, on_failure="continue", asynchronous=asynchronous)
    hook = SaveHook(config, saver.begin, saver, meter(), None, None, selection)
    best = []
    for step, score, fails in ((1, 0.5, False), (4, 0.9, True), (7, 0.7, False)):
        saver.fails = fails
        selection.update(step, score)
        for after in (step, step + 1, step + 2):
            hook.after_step(event(after))
        best.append(selection.best_step)
    assert best == [1, 1, 7]


def test_a_save_that_fails_in_the_background_is_not_the_best() -> None:
    saver: Any = FakeSaver()
    selection = Selection()
    config = CheckpointConfig(save_every=5, on_failure="continue", asynchronous=True)
    hook = SaveHook(config, saver.begin, saver, meter(), None, None, selection)
    selection.update(4, 0.9)
    hook.after_step(event(4))
    saver.fails_to_commit = True
    # The periodic save is made nevertheless.
    hook.after_step(event(5))
    assert saver.calls == ["start 4", "start 5"]
    selection.update(7, 0.7)
    hook.after_step(event(7))
    hook.after_step(event(10))
    assert (selection.best_step, selection.best_score) == (7, 0.7)


def test_a_validation_of_exit_step_selects_nothing() -> None:
    scores = iter([0.5, 0.9, 0.7])
    records: list[tuple[int, dict[str, float]]] = []
    hook = EvaluateHook(
        3,
        lambda: Evaluation({"loss": 1.0, SCORE: next(scores)}),
        meter(),
        lambda step, evaluation: records.append((step, evaluation.metrics)),
        total_steps=7,
    )
    hook.after_step(event(3))
    hook.after_step(event(5, Ending.FINISHED))
    assert hook.selection.unsaved == {3: 0.5}
    hook.after_step(event(7, Ending.FINISHED))
    assert hook.selection.unsaved == {3: 0.5, 7: 0.7}
    losses = {"loss": 1.0}
    assert records == [(3, losses | {SCORE: 0.5}), (5, losses), (7, losses | {SCORE: 0.7})]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sample_log_is_flushed_before_a_save_begins(asynchronous: bool) -> None:
    saver = FakeSaver()
    flushed: list[float] = []

    def sync() -> None:
        flushed.append(time.monotonic())
        saver.calls.append("sync")

    sample_log: Any = SimpleNamespace(sync=sync)
    config = CheckpointConfig(save_every=1, asynchronous=asynchronous)
    typed: Any = saver
    hook = SaveHook(config, saver.begin, typed, meter(), sample_log, None)
    before = time.monotonic()
    hook.after_step(event(1))
    assert saver.calls == ["sync", "start 1" if asynchronous else "save 1"]
    # Training waits for the flush as well.
    assert before <= saver.began <= flushed[0]


@pytest.mark.parametrize("ending", list(Ending))
def test_validates_when_due_and_when_finished_but_not_against_a_deadline(ending: Ending) -> None:
    reports: list[tuple[int, float]] = []
    hook = EvaluateHook(
        2,
        lambda: Evaluation({"loss": 1.0}),
        meter(),
        lambda step, evaluation: reports.append((step, evaluation.metrics["loss"])),
    )
    for step in range(1, 4):
        hook.after_step(event(step))
    hook.after_step(event(4, ending))
    assert reports == [(2, 1.0), (4, 1.0)][: 2 if ending is Ending.FINISHED else 1]


class Written:
    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, Any]]] = []
        self.skips: list[tuple[int, dict[str, Any]]] = []
        self.notes: list[str] = []

    def write(self, step: int, values: dict[str, Any], kind: str = "train") -> None:
        (self.records if kind == "train" else self.skips).append((step, values))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, step: int) -> None:
        pass

    def update(self, record: Any) -> None:
        pass


def test_logs_the_mean_loss_since_the_last_record_and_always_the_end() -> None:
    written: Any = Written()
    hook = LogHook(2, 9, meter(), written, written)
    for step, loss in enumerate((1.0, 2.0, 5.0), start=1):
        hook.after_step(event(step, Ending.PREEMPTED if step == 3 else None, loss))
    assert [(step, values["loss"]) for step, values in written.records] == [(2, 1.5), (3, 5.0)]
    assert written.records[-1][1]["consumed_samples"] == 12
    assert written.records[-1][1]["grad_norm"] == 0.5


def test_logs_the_end_of_a_phase_and_the_time_left_by_work() -> None:
    written: Any = Written()
    hook = LogHook(5, 9, meter(), written, written)
    hook.segment_end = 3
    hook.labels = {"phase": 1}
    hook.remaining_flops = lambda step: 0.0 if step == 3 else 1.0
    for step in (1, 2, 3):
        hook.after_step(event(step))
    ((step, values),) = written.records
    assert (step, values["phase"], values["seconds_left"]) == (3, 1, 0.0)


def test_a_skipped_update_is_recorded_and_shown_whether_a_record_is_due_or_not() -> None:
    written: Any = Written()
    hook = LogHook(5, 9, meter(), written, written)
    skipped = replace(result(61.25), skip="loss spike", outcome=StepOutcome(3.5, True, 1.0))
    hook.after_step(replace(event(2), result=skipped))
    assert written.records == []
    assert written.skips == [(2, {"skip": "loss spike", "loss": 61.25, "grad_norm": 3.5})]
    assert written.notes == ["step 2: no update, loss spike | loss 61.2500 | grad norm 3.500"]

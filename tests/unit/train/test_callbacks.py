"""When callbacks are due, what they do and what they record."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from megatron_deberta.checkpoint import layout
from megatron_deberta.checkpoint.layout import read_best
from megatron_deberta.checkpoint.resume import Identity
from megatron_deberta.checkpoint.saver import Saved
from megatron_deberta.config.schema import (
    CheckpointConfig,
    LogConfig,
    Phase,
    RunConfig,
    StabilityConfig,
    TrainConfig,
)
from megatron_deberta.engine.base import StepOutcome
from megatron_deberta.errors import CheckpointError, ReplicaError
from megatron_deberta.evaluate.selection import SCORE, Selection
from megatron_deberta.evaluate.validation import Evaluation
from megatron_deberta.observe.metrics import RecordKind
from megatron_deberta.observe.throughput import StepWork
from megatron_deberta.train import trainer as trainer_module
from megatron_deberta.train.callbacks import LogMetrics, PeriodicEvaluation, SaveCheckpoints
from megatron_deberta.train.records import RunRecords
from megatron_deberta.train.stability.guard import Guard
from megatron_deberta.train.state import Ending, StepResult, TrainState
from megatron_deberta.train.trainer import Trainer
from tests.support.trainers import step_result, trainer_at

RESULT = step_result()


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

    def save(self, metadata: Any, retention: Any, began: float) -> Saved | None:
        self._begin("save", metadata.step, began, 0)
        return self._saved()

    def start(self, metadata: Any, retention: Any, began: float) -> None:
        self._begin("start", metadata.step, began, 2)

    def _begin(self, call: str, step: int, began: float, polls: int) -> None:
        assert not self.left
        self.began = began
        self.calls.append(f"{call} {step}")
        if self.fails:
            raise CheckpointError("the disk is full")
        self.step, self.left = step, polls

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


class Told:
    """A callback that notes the steps of committed checkpoints, and validations."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.validated: list[tuple[str, dict[str, float]]] = []

    def on_validation(self, trainer: Any, kind: RecordKind, evaluation: Evaluation) -> None:
        self.validated.append((kind, evaluation.metrics))

    def on_save(self, trainer: Any, saved: Saved) -> None:
        self.saved.append(saved.step)


def saves(config: CheckpointConfig, saver: FakeSaver, steps: Sequence[Any]) -> list[int]:
    """Return the steps whose checkpoint was committed.

    Args:
        config: schedule.
        saver: of the run.
        steps: of each step its number, or arguments of ``trainer_at``.
    """
    told, save = Told(), SaveCheckpoints(config, keeps_best=False)
    for step in steps:
        number, ending, requested = (*step, False) if isinstance(step, tuple) else (step, None, 0)
        trainer = trainer_at(number, ending, saver=saver, callbacks=[told])
        trainer.save_requested = bool(requested)
        save.on_step_end(trainer, RESULT)
    return told.saved


@pytest.mark.parametrize(
    ("every", "saved"), [(2, [2, 4, 5]), (5, [5]), (0, [5]), (1, [1, 2, 3, 4, 5])]
)
def test_saves_when_due_and_once_at_the_end(every: int, saved: list[int]) -> None:
    steps = [1, 2, 3, 4, (5, Ending.PREEMPTED)]
    assert saves(CheckpointConfig(save_every=every), FakeSaver(), steps) == saved
    trainer = trainer_at(7, saver=FakeSaver(), callbacks=[told := Told()], save_requested=True)
    config = CheckpointConfig(save_every=every + 8)
    SaveCheckpoints(config, keeps_best=False).on_step_end(trainer, RESULT)
    assert told.saved == [7]


def test_in_the_background_the_next_save_and_the_end_wait_for_the_one_before() -> None:
    saver, config = FakeSaver(), CheckpointConfig(save_every=3, asynchronous=True)
    assert saves(config, saver, [*range(1, 8), (8, Ending.INTERRUPTED)]) == [3, 6, 8]
    assert saver.calls == ["start 3", "commit 3", "start 6", "commit 6", "save 8"]
    saver, config = FakeSaver(), CheckpointConfig(save_every=1, asynchronous=True)
    assert saves(config, saver, [1, 2, (3, Ending.FINISHED)]) == [1, 2, 3]
    assert saver.calls == ["start 1", "commit 1", "start 2", "commit 2", "save 3"]
    saver = FakeSaver()
    trainer = trainer_at(1, saver=saver, save_requested=True)
    SaveCheckpoints(config, keeps_best=False).on_step_end(trainer, RESULT)
    assert saver.calls == ["save 1"]


def test_a_failed_save_ends_the_run_or_not_but_always_one_that_was_asked_for() -> None:
    with pytest.raises(CheckpointError):
        saves(CheckpointConfig(save_every=2), FakeSaver(fails=True), [1, 2, 3])
    config, saver = CheckpointConfig(save_every=1, on_failure="continue"), FakeSaver(fails=True)
    assert saves(config, saver, [1, 2, 3]) == []
    assert saver.calls == ["save 1", "save 2", "save 3"]
    with pytest.raises(CheckpointError):
        saves(config, saver, [(4, Ending.PREEMPTED)])
    # Only after a save the trainer looks for new requests.
    for save, is_saved in ((FakeSaver(), True), (saver, False)):
        callback = SaveCheckpoints(config, keeps_best=False)
        assert callback.on_step_end(trainer_at(1, saver=save), RESULT) == is_saved


def test_preempted_process_completes_the_save_in_flight_and_makes_no_second_one() -> None:
    saver, config = FakeSaver(), CheckpointConfig(save_every=3, asynchronous=True)
    assert saves(config, saver, [1, 2, 3, (4, Ending.PREEMPTED)]) == [3]
    assert saver.calls == ["start 3", "commit 3"]
    # Without a deadline the last step is saved, too.
    for ending in (Ending.INTERRUPTED, Ending.STOPPED, Ending.FINISHED):
        assert saves(config, FakeSaver(), [1, 2, 3, (4, ending)]) == [3, 4]
    saver = FakeSaver()
    saver.fails_to_commit = True
    assert saves(config, saver, [1, 2, 3, (4, Ending.PREEMPTED)]) == [4]
    assert saver.calls == ["start 3", "save 4"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_only_a_saved_checkpoint_becomes_the_best(asynchronous: bool) -> None:
    """With ``on_failure=continue``, the best one stays the best if a better one is not saved."""
    saver, selection = FakeSaver(), Selection()
    config = CheckpointConfig(save_every=0, on_failure="continue", asynchronous=asynchronous)
    save, best = SaveCheckpoints(config, keeps_best=True), []
    for step, score, fails in ((1, 0.5, False), (4, 0.9, True), (7, 0.7, False)):
        saver.fails = fails
        selection.update(step, score)
        for after in (step, step + 1, step + 2):
            save.on_step_end(trainer_at(after, saver=saver, selection=selection), RESULT)
        best.append(selection.best_step)
    assert best == [1, 1, 7]


def test_a_save_that_fails_in_the_background_is_not_the_best() -> None:
    saver, selection = FakeSaver(), Selection()
    config = CheckpointConfig(save_every=5, on_failure="continue", asynchronous=True)
    save = SaveCheckpoints(config, keeps_best=True)

    def after(step: int) -> None:
        save.on_step_end(trainer_at(step, saver=saver, selection=selection), RESULT)

    selection.update(4, 0.9)
    after(4)
    saver.fails_to_commit = True
    # The periodic save is made nevertheless.
    after(5)
    assert saver.calls == ["start 4", "start 5"]
    selection.update(7, 0.7)
    after(7)
    after(10)
    assert (selection.best_step, selection.best_score) == (7, 0.7)


def test_a_full_disk_delays_the_record_of_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``on_failure=continue`` it is written after the next save; at the end it must be."""

    def full(final: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(final))

    def after(save: SaveCheckpoints, step: int, ending: Ending | None = None) -> None:
        records = SimpleNamespace(
            run_dir=tmp_path, record_checkpoint=lambda *_: None, longest_check=0, longest_step=0
        )
        lock = SimpleNamespace(record=lambda *_, **__: None)
        options = {"saver": FakeSaver(), "selection": selection, "records": records, "lock": lock}
        save.on_step_end(trainer_at(step, ending, **options), RESULT)

    selection = Selection()
    config = CheckpointConfig(save_every=2, on_failure="continue")
    save = SaveCheckpoints(config, keeps_best=True)
    with monkeypatch.context() as patches:
        patches.setattr(layout, "write_atomically", full)
        selection.update(2, 0.5)
        after(save, 2)
        assert selection.best_step == 2
        assert read_best(tmp_path) is None
        with pytest.raises(OSError, match="No space left"):
            after(save, 3, Ending.FINISHED)
        selection.update(4, 0.9)
        with pytest.raises(OSError, match="No space left"):
            after(SaveCheckpoints(CheckpointConfig(save_every=2), keeps_best=True), 4)
    # A save whose step is not the best one.
    after(save, 6)
    assert read_best(tmp_path) == {"step": 4, "score": 0.9}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sample_log_is_flushed_before_a_save_begins(asynchronous: bool) -> None:
    saver = FakeSaver()
    flushed: list[float] = []

    def sync() -> None:
        flushed.append(time.monotonic())
        saver.calls.append("sync")

    config = CheckpointConfig(save_every=1, asynchronous=asynchronous)
    trainer = trainer_at(1, saver=saver, sample_log=SimpleNamespace(sync=sync))
    before = time.monotonic()
    SaveCheckpoints(config, keeps_best=False).on_step_end(trainer, RESULT)
    assert saver.calls == ["sync", "start 1" if asynchronous else "save 1"]
    # Training waits for the flush as well.
    assert before <= saver.began <= flushed[0]


class Pairs(PeriodicEvaluation):
    """An evaluation with given results, in order."""

    kind: ClassVar[RecordKind] = "minimal_pairs"

    def __init__(self, every: int, results: Sequence[Evaluation | None]) -> None:
        self.steps = every
        self.results = list(results)
        self.shown: list[tuple[int, dict[str, float]]] = []

    def every(self, trainer: Trainer) -> int:
        return self.steps

    def evaluate(self, trainer: Trainer) -> Evaluation | None:
        return self.results.pop(0)

    def show(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self.shown.append((trainer.state.step, evaluation.metrics))


def test_a_validation_of_exit_step_selects_nothing() -> None:
    scores = (0.5, 0.9, 0.7)
    pairs = Pairs(3, [Evaluation({"loss": 1.0, SCORE: score}) for score in scores])
    config = RunConfig(train=TrainConfig(steps=7, global_batch_size=4))
    selection = Selection()

    def after(step: int, ending: Ending | None = None) -> None:
        trainer = trainer_at(step, ending, config=config, selection=selection, records=object())
        pairs.on_step_end(trainer, RESULT)

    after(3)
    after(5, Ending.FINISHED)
    assert selection.unsaved == {3: 0.5}
    after(7, Ending.FINISHED)
    assert selection.unsaved == {3: 0.5, 7: 0.7}
    losses = {"loss": 1.0}
    assert pairs.shown == [(3, losses | {SCORE: 0.5}), (5, losses), (7, losses | {SCORE: 0.7})]


@pytest.mark.parametrize("ending", list(Ending))
def test_validates_when_due_and_when_finished_but_not_against_a_deadline(ending: Ending) -> None:
    pairs, told = Pairs(2, [Evaluation({"loss": 1.0})] * 2), Told()
    for step in range(1, 4):
        pairs.on_step_end(trainer_at(step, records=object(), callbacks=[told]), RESULT)
    pairs.on_step_end(trainer_at(4, ending, records=object()), RESULT)
    assert told.validated == [("minimal_pairs", {"loss": 1.0})]
    assert [step for step, _ in pairs.shown] == [2, 4][: 2 if ending is Ending.FINISHED else 1]


class Written:
    """What is written to ``metrics.jsonl`` and shown."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, Any]]] = []
        self.skips: list[tuple[int, dict[str, Any]]] = []
        self.notes: list[str] = []

    def records_of_run(self) -> Any:
        """Return what stands for ``RunRecords``."""
        records = SimpleNamespace(
            writer=self, console=self, longest_step=0.0, longest_check=0.0,
            record_checkpoint=lambda *_: None, plot=lambda: None,
        )  # fmt: skip
        records.record_step = MethodType(RunRecords.record_step, records)
        records.record_skip = MethodType(RunRecords.record_skip, records)
        return records

    def write(self, step: int, values: dict[str, Any], kind: str = "train") -> None:
        (self.records if kind == "train" else self.skips).append((step, values))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, step: int) -> None:
        pass

    def update(self, *record: Any) -> None:
        pass


def log(written: Written, log: LogMetrics, step: int, result: StepResult, **options: Any) -> None:
    """Call a log after a step."""
    config = options.pop("config", None) or RunConfig(
        train=TrainConfig(steps=9, global_batch_size=4),
        log=LogConfig(every=options.pop("every", 5)),
    )
    records = written.records_of_run()
    trainer = trainer_at(step, options.pop("ending", None), config=config, records=records)
    trainer.data = SimpleNamespace(step_work=lambda config: StepWork(8, 1.0))
    if step == 1:
        log.on_start(trainer)
    log.on_step_end(trainer, result)


def test_logs_the_mean_loss_since_the_last_record_and_always_the_end() -> None:
    written, metrics = Written(), LogMetrics()
    for step, loss in enumerate((1.0, 2.0, 5.0), start=1):
        ending = Ending.PREEMPTED if step == 3 else None
        log(written, metrics, step, step_result(loss), ending=ending, every=2)
    assert [(step, values["loss"]) for step, values in written.records] == [(2, 1.5), (3, 5.0)]
    assert written.records[-1][1]["consumed_samples"] == 12
    assert written.records[-1][1]["grad_norm"] == 0.5


def test_logs_the_end_of_a_phase_and_the_time_left_by_work() -> None:
    phases = tuple(
        Phase(steps=steps, overrides=(("data.sequence_length", length),))
        for steps, length in ((3, 16), (6, 32))
    )
    config = RunConfig(
        train=TrainConfig(steps=9, global_batch_size=4, phases=phases), log=LogConfig(every=5)
    )
    written, metrics = Written(), LogMetrics()
    for step in (1, 2, 3):
        log(written, metrics, step, RESULT, config=config)
    ((step, values),) = written.records
    assert (step, values["phase"], values["sequence_length"]) == (3, 1, 16)
    assert values["seconds_left"] > 0


def test_a_skipped_update_is_recorded_and_shown_whether_a_record_is_due_or_not() -> None:
    written = Written()
    skipped = StepResult(61.25, 1e-3, StepOutcome(3.5, True, 1.0), skip="loss spike")
    log(written, LogMetrics(), 2, skipped)
    assert written.records == []
    assert written.skips == [(2, {"skip": "loss spike", "loss": 61.25, "grad_norm": 3.5})]
    assert written.notes == ["step 2: no update, loss spike | loss 61.2500 | grad norm 3.500"]


def trainer_with_replicas(calls: list[str], check_every: int) -> Trainer:
    """Return a trainer after step 7 whose saver notes what it is asked."""
    config = RunConfig(stability=StabilityConfig(replica_check_every=check_every))
    saver = SimpleNamespace(
        in_flight=False, finish=lambda: None, poll=lambda: None,
        save=lambda metadata, *_: calls.append(f"save {metadata.step}"),
        start=lambda metadata, *_: calls.append(f"start {metadata.step}"),
    )  # fmt: skip
    fake: Any = SimpleNamespace(
        identity=Identity("/tokenizer", "t" * 64, "d" * 64), module=None, specs={}
    )
    nothing: Any = None
    typed: Any = saver
    trainer = Trainer(
        config=config, groups=nothing, data=SimpleNamespace(identity=fake.identity),  # type: ignore[arg-type]
        model=fake, engine=fake, saver=typed, state=TrainState(7, 28), guard=Guard.of_run(config),
        callbacks=[], signals=nothing, lock=nothing,
    )  # fmt: skip
    trainer.meter, trainer.train_step = trainer_at(7).meter, nothing
    trainer.save_requested = True
    return trainer


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("check_every", [0, 50])
def test_replicas_are_compared_before_a_save(
    monkeypatch: pytest.MonkeyPatch, wait: bool, check_every: int
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        trainer_module, "check_replicas", lambda *args: calls.append(f"check {args[-1]}")
    )
    trainer = trainer_with_replicas(calls, check_every)
    trainer.save_requested = wait
    config = CheckpointConfig(save_every=7, asynchronous=True)
    SaveCheckpoints(config, keeps_best=False).on_step_end(trainer, RESULT)
    check = ["check 7"] if check_every else []
    assert calls == [*check, "save 7" if wait else "start 7"]


@pytest.mark.parametrize("wait", [True, False])
def test_differing_replicas_are_not_saved(monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    def differing(*args: Any) -> None:
        raise ReplicaError("step 7: weight differs")

    calls: list[str] = []
    monkeypatch.setattr(trainer_module, "check_replicas", differing)
    trainer = trainer_with_replicas(calls, 50)
    trainer.save_requested = wait
    config = CheckpointConfig(save_every=7, asynchronous=True)
    with pytest.raises(ReplicaError, match="step 7"):
        SaveCheckpoints(config, keeps_best=False).on_step_end(trainer, RESULT)
    assert calls == []


def test_worst_case_of_a_stop_contains_the_check_of_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_module, "check_replicas", lambda *_: time.sleep(0.01))
    trainer = trainer_with_replicas([], 50)
    records = trainer.records = Written().records_of_run()
    records.longest_step = 2.0
    events: list[dict[str, Any]] = []
    trainer.lock = SimpleNamespace(record=lambda event, **values: events.append(values))  # type: ignore[assignment]
    trainer.saver.save = lambda *_: Saved(Path(), 7, 3.0, 0.5, 28)  # type: ignore[method-assign, assignment]
    SaveCheckpoints(CheckpointConfig(), keeps_best=False).on_step_end(trainer, RESULT)
    assert records.longest_check >= 0.01
    assert events[0]["save_seconds"] == 3.0 + records.longest_check
    # The step after the signal may end with a check of its own.
    assert events[0]["step_seconds"] == 2.0 + records.longest_check

"""Background saving: the checkpoint holds the state at its start."""

from __future__ import annotations

import datetime
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_deberta.checkpoint import store, writer
from megatron_deberta.checkpoint.layout import checkpoints_dir, committed_steps
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.retention import Retention
from megatron_deberta.checkpoint.saver import Saver
from megatron_deberta.errors import CheckpointError
from megatron_deberta.train.step import TrainStep
from tests.support.checkpoints import metadata
from tests.support.layout_matrix import Layout, build, micro_batches, run_config
from tests.support.ranks import RankPool, grid

LAYOUTS = [Layout(2, 1, True, "none"), Layout(1, 3, False, "none"), Layout(1, 0, False, "none")]


# So that the ranks exchange and write in several batches
SMALL_FILES = mock.patch.object(writer, "FILE_BYTES", 20_000)


class Run:
    """Training on one layout, step by step."""

    def __init__(self, layout: Layout, run_dir: str, ema_decay: float = 0.0) -> None:
        config = run_config(layout)
        config = replace(config, optimizer=replace(config.optimizer, ema_decay=ema_decay))
        self.config = config
        self.groups = grid(layout.tp_size)
        self.model, self.engine = build(config, self.groups)
        self.take_step = TrainStep(self.engine, config, self.groups)
        self.saver = Saver(run_dir, self.engine, self.model.specs, self.groups)
        self.losses: list[float] = []

    def step(self) -> None:
        done = len(self.losses)
        self.losses.append(self.take_step(done, micro_batches(done, self.groups)).loss)


@SMALL_FILES
def save_while_training(rank: int, layout: Layout, run_dir: str) -> tuple[list[float], list[int]]:
    """Train two steps while rank 1's writing is blocked, like on a slow disk."""
    run, written = Run(layout, run_dir), threading.Event()
    original = writer.write_tensors

    def slow(*args: Any) -> tuple[int, str]:
        assert rank != 1 or written.wait(60)
        return original(*args)

    writer.write_tensors = slow
    committed = []
    try:
        run.step()
        run.step()
        run.saver.timeout_minutes = 7.0
        run.saver.start(metadata(2), Retention(keep_last=1))
        # Not the default of half an hour: ranks whose peers are gone would wait that long.
        assert timeout_of(run.saver) == datetime.timedelta(minutes=7)
        for _ in range(2):
            run.step()
            assert run.saver.poll() is None
            committed.append(len(committed_steps(run_dir)))
        written.set()
        saved = run.saver.finish()
        assert saved is not None
        assert saved.blocked_seconds < saved.seconds
        committed += committed_steps(run_dir)
        assert run.saver.poll() is None
        assert run.saver.finish() is None
    finally:
        writer.write_tensors = original
    run.engine.destroy()
    return run.losses, committed


def timeout_of(saver: Saver) -> datetime.timedelta:
    group: Any = saver._group
    timeout: datetime.timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


@SMALL_FILES
def save_and_train(rank: int, layout: Layout, run_dir: str) -> list[float]:
    """Train the same run, waiting for the checkpoint."""
    run = Run(layout, run_dir)
    for step in range(4):
        run.step()
        if step == 1:
            run.saver.save(metadata(2), Retention())
    run.engine.destroy()
    return run.losses


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.nightly if layout.zero_stage == 3 else ())
        for layout in LAYOUTS
    ],
    ids=lambda layout: layout.name,
)
def test_state_is_that_of_the_start_of_the_save(
    four_ranks: RankPool, tmp_path: Path, layout: Layout
) -> None:
    folders = [str(tmp_path / name) for name in ("background", "waiting")]
    results = four_ranks.run(save_while_training, layout, folders[0])
    expected = four_ranks.run(save_and_train, layout, folders[1])
    assert [losses for losses, _ in results] == expected
    # No checkpoint is complete before rank 1 has written.
    assert {tuple(committed) for _, committed in results} == {(0, 0, 2)}
    actual, expected = (CheckpointReader(store.find_newest(folder) or "") for folder in folders)
    actual.verify()
    for name in expected.shapes:
        for kind in expected.kinds:
            assert actual.tensor(name, kind).equal(expected.tensor(name, kind)), (name, kind)
    assert actual.metadata.scalars == expected.metadata.scalars


@SMALL_FILES
def fail_in_the_background(rank: int, layout: Layout, run_dir: str) -> tuple[str, int]:
    """Make rank 1's disk full; return the error and the number of steps before it."""
    run = Run(layout, run_dir)
    run.saver.save(metadata(0), Retention())
    original = writer.write_tensors

    def full(*_: Any) -> tuple[int, str]:
        raise OSError(28, "No space left on device")

    if rank == 1:
        writer.write_tensors = full
    message = "saved"
    try:
        run.saver.start(metadata(3), Retention())
        while run.saver.poll() is None:
            run.step()
    except CheckpointError as error:
        message = str(error)
    finally:
        writer.write_tensors = original
    # The next save succeeds.
    run.saver.start(metadata(5), Retention(keep_last=1))
    assert run.saver.finish() is not None
    run.engine.destroy()
    return message, len(run.losses)


def test_error_is_raised_at_a_step_on_all_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    layout = Layout(1, 1, False, "none")
    (one, steps), (other, same_steps) = two_ranks.run(fail_in_the_background, layout, str(tmp_path))
    assert "step_00000003 was not saved: another rank failed" in one
    assert "No space left on device" in other
    assert steps == same_steps
    assert [path.name for path in checkpoints_dir(tmp_path).iterdir()] == ["step_00000005"]

"""Local checkpoints of four ranks as two nodes are used if complete with replicas."""

from __future__ import annotations

import errno
import logging
import logging.handlers
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_deberta.checkpoint.layout import (
    COMMITTED_FILE,
    EMA,
    KINDS,
    CheckpointMetadata,
    committed_steps,
    step_dir,
)
from megatron_deberta.checkpoint.local import parts, recovery
from megatron_deberta.checkpoint.local.recovery import History
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.retention import Retention
from megatron_deberta.checkpoint.writer import UNLOCKED
from megatron_deberta.config.schema import CheckpointConfig, RunConfig, TrainConfig
from megatron_deberta.train.local_checkpoints import LocalCheckpoints
from tests.distributed.test_background_save import Run
from tests.support.checkpoints import metadata
from tests.support.layout_matrix import Layout
from tests.support.ranks import RankPool, grid
from tests.support.trainers import step_result, trainer_at

LAYOUT = Layout(2, 1, True, "none")
STEP = 3


def open_local(rank: int, folder: str) -> LocalCheckpoints:
    """Open the local checkpoints of a run, with one half of the ranks on each of two nodes."""
    os.environ["SLURMD_NODENAME"] = f"node{2 * rank // dist.get_world_size()}"
    config = RunConfig(
        train=TrainConfig(run_dir=f"{folder}/run"),
        checkpoint=CheckpointConfig(local_every=1, local_dir=f"{folder}/local"),
    )
    try:
        local = LocalCheckpoints.open(config, grid(2), UNLOCKED)
    finally:
        del os.environ["SLURMD_NODENAME"]
    assert local is not None
    return local


class LocalRun(Run):
    """Training with local saves."""

    def __init__(self, rank: int, folder: str) -> None:
        super().__init__(LAYOUT, f"{folder}/shared", ema_decay=0.9)
        self.local = open_local(rank, folder)
        self.local.start_saving(0, self.engine, self.model.specs)
        assert self.local.saver is not None
        self.saves = self.local.saver

    def save(self, step: int) -> dict[str, Any]:
        """Save, and return the result once all ranks have it."""
        assert self.saves.start(metadata(step, self.config))
        return self.finish()

    def wait_for_all(self) -> None:
        """Wait for all ranks."""
        self.local.nodes.sum([0])

    def finish(self) -> dict[str, Any]:
        """Return the result of the save in progress."""
        self.saves.join(60)
        saved = self.saves.poll()
        assert saved is not None
        return asdict(saved)


def save_local_and_shared(rank: int, folder: str) -> dict[str, Any]:
    run = LocalRun(rank, folder)
    run.step()
    run.save(1)
    run.step()
    saved = run.save(STEP)
    run.saver.save(metadata(STEP, run.config), Retention())
    run.engine.destroy()
    return saved


@pytest.fixture(scope="module")
def saved_run(four_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two local saves, and the same state as a shared checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "run").mkdir()
    results = four_ranks.run(save_local_and_shared, str(folder))
    assert all(saved["is_complete"] for saved in results)
    assert all(saved["failed_parts"] + saved["failed_replicas"] == 0 for saved in results)
    for name in ("local", "run"):
        shutil.copytree(folder / name, folder / "backup" / name)
    return folder


def local_part(folder: Path, node: int, rank: int, step: int = STEP) -> Path:
    (path,) = (folder / "local" / f"node{node}").glob(f"*/*step_{step:08d}-rank_{rank:05d}")
    return path


def lose_node(folder: Path) -> None:
    shutil.rmtree(folder / "local" / "node1")


def flip_bit(folder: Path) -> None:
    (file,) = local_part(folder, 0, 1).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def keep(_: Path) -> None:
    """Lose nothing."""


def lose_both_holders(folder: Path) -> None:
    for node in (0, 1):
        shutil.rmtree(local_part(folder, node, 2))


def crash_in_a_save(folder: Path) -> None:
    for node in (0, 1):
        (local_part(folder, node, 2) / COMMITTED_FILE).unlink()


def damage_both_copies(folder: Path) -> None:
    flip_bit(folder)
    (file,) = local_part(folder, 1, 1).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


def roll_back(folder: Path) -> None:
    history = History.of_run(folder / "run")
    assert history is not None
    history.began(0).write(folder / "run", lambda: None)


def recover(rank: int, folder: str) -> list[str]:
    """Open the local checkpoints of a run; return what is logged."""
    handler = logging.handlers.BufferingHandler(100)
    recovery.logger.addHandler(handler)
    recovery.logger.setLevel(logging.INFO)
    try:
        open_local(rank, folder)
    finally:
        recovery.logger.removeHandler(handler)
        recovery.logger.setLevel(logging.NOTSET)
    return [record.getMessage() for record in handler.buffer]


@pytest.fixture
def folder(saved_run: Path) -> Path:
    """Return the folder of the saved run as it was after the saves."""
    for name in ("local", "run"):
        shutil.rmtree(saved_run / name, ignore_errors=True)
        shutil.copytree(saved_run / "backup" / name, saved_run / name)
    return saved_run


@pytest.mark.parametrize(
    ("loss", "taken", "logged"),
    [
        (keep, STEP, "(replicas of ranks: none)"),
        (lose_node, STEP, "(replicas of ranks: 2 from node0, 3 from node0)"),
        (flip_bit, STEP, "(replicas of ranks: 1 from node1)"),
        # The save before is deleted only when the next one starts.
        (lose_both_holders, 1, "(replicas of ranks: none)"),
        (crash_in_a_save, 1, "(replicas of ranks: none)"),
        (damage_both_copies, 1, "(replicas of ranks: none)"),
        (roll_back, None, "(none is newer): there is no checkpoint in the run folder either"),
    ],
)
def test_newest_complete_local_save_is_taken(
    four_ranks: RankPool,
    folder: Path,
    loss: Callable[[Path], None],
    taken: int | None,
    logged: str,
) -> None:
    loss(folder)
    for (line,) in four_ranks.run(recover, str(folder)):
        assert line.endswith(logged), line
    run_dir = folder / "run"
    assert committed_steps(run_dir) == ([] if taken is None else [taken])
    if taken == STEP:
        check_recovered(folder)


def test_recovery_on_another_layout(two_ranks: RankPool, folder: Path) -> None:
    """Two ranks copy what four have saved, replicas of a part that is damaged included."""
    flip_bit(folder)
    two_ranks.run(recover, str(folder))
    check_recovered(folder)


@pytest.mark.parametrize("damage", [lose_both_holders, damage_both_copies])
def test_what_no_save_can_replace_is_named(
    four_ranks: RankPool, folder: Path, damage: Callable[[Path], None]
) -> None:
    for node in (0, 1):
        for rank in range(4):
            for path in (folder / "local" / f"node{node}").glob(f"*/*step_00000001-*_{rank:05d}"):
                shutil.rmtree(path)
    damage(folder)
    why = "lacks the parts of ranks 2" if damage is lose_both_holders else "is damaged"
    for (line,) in four_ranks.run(recover, str(folder)):
        assert line.startswith(f"no local checkpoint is used (step {STEP} {why})"), line
    assert committed_steps(folder / "run") == []


def check_recovered(folder: Path) -> None:
    """Compare the recovered checkpoint with the one that was saved to the run folder."""
    actual, expected = (
        CheckpointReader(step_dir(folder / name, STEP)) for name in ("run", "shared")
    )
    actual.verify()
    assert actual.kinds == expected.kinds == (*KINDS, EMA)
    for name in expected.shapes:
        for kind in expected.kinds:
            assert actual.tensor(name, kind).equal(expected.tensor(name, kind)), (name, kind)
    assert actual.metadata == expected.metadata


def test_newer_checkpoint_of_the_run_folder_is_kept(four_ranks: RankPool, folder: Path) -> None:
    shutil.copytree(folder / "shared" / "checkpoints", folder / "run" / "checkpoints")
    (folder / "run" / "checkpoints" / f"step_{STEP:08d}").rename(
        folder / "run" / "checkpoints" / f"step_{STEP + 1:08d}"
    )
    four_ranks.run(recover, str(folder))
    assert committed_steps(folder / "run") == [STEP + 1]


def save_on_failing_disks(rank: int, folder: str, failure: str) -> list[dict[str, Any]]:
    """Save while node 1's disk fails, then after it works again."""
    run, original = LocalRun(rank, folder), parts.write_durably
    calls = 0

    def fails(path: Path, content: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            original(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, content)

    node = Path(folder, "local", f"node{rank // 2}")
    if rank >= 2 and failure == "full":
        parts.write_durably = fails
    elif rank == 2:
        # As on a read-only disk, no folder can be made.
        shutil.rmtree(node, ignore_errors=True)
        node.parent.mkdir(exist_ok=True)
        node.write_text("")
    run.wait_for_all()
    results = [run.save(1), run.save(2)]
    parts.write_durably = original
    if rank == 2 and failure != "full":
        node.unlink()
    run.wait_for_all()
    results.append(run.save(3))
    run.engine.destroy()
    return results


@pytest.mark.parametrize("failure", ["full", "read-only"])
def test_failing_disk_is_counted_and_does_not_end_the_run(
    four_ranks: RankPool, tmp_path: Path, failure: str
) -> None:
    (tmp_path / "run").mkdir()
    results = four_ranks.run(save_on_failing_disks, str(tmp_path), failure)
    for first, second, third in results:
        for saved in (first, second):
            # Node 0 holds its own parts and the replicas of node 1.
            assert (saved["failed_parts"], saved["failed_replicas"]) == (2, 2)
            assert saved["is_complete"]
        assert (third["failed_parts"], third["failed_replicas"]) == (0, 0)
    four_ranks.run(recover, str(tmp_path))
    assert committed_steps(tmp_path / "run") == [3]


def save_on_a_slow_disk(rank: int, folder: str) -> tuple[list[bool], dict[str, Any]]:
    """Train while the disk of rank 3 is blocked, and save meanwhile."""
    run, original, written = LocalRun(rank, folder), parts.write_durably, threading.Event()

    def slow(path: Path, content: bytes) -> None:
        assert rank != 3 or written.wait(60)
        original(path, content)

    parts.write_durably = slow
    try:
        run.step()
        started = [run.saves.start(metadata(1, run.config))]
        run.step()
        assert run.saves.poll() is None
        started.append(run.saves.start(metadata(2, run.config)))
        written.set()
        saved = run.finish()
    finally:
        parts.write_durably = original
    run.engine.destroy()
    return started, saved


def test_slow_disk_skips_a_save_and_training_goes_on(four_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for started, saved in four_ranks.run(save_on_a_slow_disk, str(tmp_path)):
        assert started == [True, False]
        assert saved["save"]["step"] == 1
        assert saved["skipped"] == 1
        assert saved["is_complete"]
        assert saved["blocked_seconds"] < saved["seconds"]


def wait_for_a_save(rank: int, folder: str) -> dict[str, Any]:
    """Save by the callback of a run whose sample log and check of replicas take their time."""
    run = LocalRun(rank, folder)

    def describe() -> CheckpointMetadata:
        time.sleep(0.2)
        return metadata(1, run.config)

    def sync() -> None:
        time.sleep(0.2)

    saved: list[dict[str, Any]] = []

    def write(step: int, values: dict[str, Any], kind: str) -> None:
        saved.append(values)

    trainer = trainer_at(
        1,
        groups=run.groups,
        checkpoint_metadata=describe,
        sample_log=SimpleNamespace(sync=sync),
        records=SimpleNamespace(writer=SimpleNamespace(write=write)),
    )
    # Every step is saved, so training waits for the end of the save as well.
    run.local.on_step_end(trainer, step_result())
    run.engine.destroy()
    return saved[0]


def test_the_recorded_wait_is_all_that_training_waits(four_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for saved in four_ranks.run(wait_for_a_save, str(tmp_path)):
        assert 0.4 <= saved["blocked_seconds"] <= saved["seconds"]


def start_with_a_broken_disk(rank: int, folder: str) -> bool:
    """Start and finish a run whose local folder cannot be listed."""

    def fails(*_: Any) -> Iterator[Path]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with mock.patch.object(Path, "glob", fails):
        run = LocalRun(rank, folder)
        run.local.close(is_finished=True)
    run.engine.destroy()
    return run.local.saver is not None


def test_a_disk_that_cannot_be_listed_does_not_end_a_run(
    four_ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    assert all(four_ranks.run(start_with_a_broken_disk, str(tmp_path)))

"""A process that has lost the run folder's lock cannot commit, whenever it was suspended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.checkpoint import writer
from megatron_deberta.checkpoint.layout import KINDS, checkpoints_dir, committed_steps
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.retention import delete_leftovers
from megatron_deberta.checkpoint.saver import StateCollector
from megatron_deberta.checkpoint.writer import Fence
from megatron_deberta.errors import CheckpointError
from tests.support.checkpoints import (
    SHAPES,
    FakeEngine,
    grid_place,
    logical_states,
    metadata,
    save_state,
    specs_of,
)

# System calls of rank 0 between which a process may be suspended.
POINTS = 30


class Lost(BaseException):
    """In place of the end of the process that has lost the lock."""


class Holders:
    """Two processes that save the same step, the second after it has taken the lock."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.newest = run_dir, 1

    def fence(self, number: int) -> Fence:
        def check() -> None:
            if self.newest != number:
                raise Lost

        return Fence(number, check)

    def save(self, number: int, seed: int, step: int = 7) -> Path:
        groups = grid_place(0, 1, 1)
        specs = specs_of(groups)
        engine: Any = FakeEngine(specs, logical_states(seed))
        return save_state(
            self.run_dir, engine, specs, groups, metadata(step), fence=self.fence(number)
        )

    def take_over(self, *, saves: bool) -> None:
        """Take the lock like ``pretrain``: then nothing that was staged can be committed."""
        self.newest = 2
        delete_leftovers(self.run_dir)
        self.found = committed_steps(self.run_dir)
        if saves:
            self.save(2, seed=2)


def suspend_at(monkeypatch: pytest.MonkeyPatch, point: int, meanwhile: Callable[[], None]) -> None:
    """Call a function before the n-th rename or flush of a save."""
    left = [point]

    def wrap(original: Any) -> Any:
        def function(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                meanwhile()
            return original(*args)

        return function

    monkeypatch.setattr(writer, "fsync_path", wrap(writer.fsync_path))
    monkeypatch.setattr(writer, "write_durably", wrap(writer.write_durably))
    monkeypatch.setattr(Path, "rename", wrap(Path.rename))


@pytest.mark.parametrize("saves", [False, True])
def test_suspended_loser_commits_nothing(tmp_path: Path, saves: bool) -> None:
    refused = committed_before = 0
    for point in range(1, POINTS):
        holders = Holders(tmp_path / str(point))
        with pytest.MonkeyPatch.context() as patch:
            suspend_at(patch, point, lambda h=holders: h.take_over(saves=saves))  # type: ignore[misc]
            try:
                holders.save(1, seed=1)
            except (Lost, CheckpointError):
                refused += 1
        if holders.newest == 1:
            break
        # What the new holder found is what is there, besides its own checkpoint.
        expected = sorted({*holders.found, *([7] if saves else [])})
        assert committed_steps(holders.run_dir) == expected, point
        committed_before += holders.found == [7]
        for step in expected:
            reader = CheckpointReader(checkpoints_dir(holders.run_dir) / f"step_{step:08d}")
            reader.verify()
            seed = 2 if saves else 1
            expected_states = logical_states(seed)
            for name in reader.shapes:
                assert reader.tensor(name).equal(expected_states[name]["weight"])
    else:
        pytest.fail("more points than expected")
    assert refused >= 6
    assert committed_before >= 1


def test_failing_loser_keeps_the_new_holders_staging_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders = Holders(tmp_path)
    staging = checkpoints_dir(tmp_path) / ".staging-step_00000007.2"

    def full(*args: Any) -> None:
        holders.newest = 2
        staging.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_tensors", full)
    with pytest.raises(Lost):
        holders.save(1, seed=1)
    assert staging.exists()


def test_loser_does_not_write_into_the_new_holders_folder(tmp_path: Path) -> None:
    groups = grid_place(0, 1, 1)
    specs = specs_of(groups)
    engine: Any = FakeEngine(specs, logical_states(1))
    holders = Holders(tmp_path)
    states = StateCollector(engine, specs, groups, None).assemble()
    staged, other = (
        writer.StagedCheckpoint(tmp_path, metadata(7), KINDS, SHAPES, groups, holders.fence(n))
        for n in (1, 2)
    )
    writer.begin(staged)
    holders.newest = 2
    delete_leftovers(tmp_path)
    writer.begin(other)
    with pytest.raises(Exception, match="No such file"):
        writer.write(staged, states)
    assert list(other.staging.iterdir()) == []

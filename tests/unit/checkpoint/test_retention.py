"""Retention and deletion: expired checkpoints and unfinished saves go, foreign folders stay."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.checkpoint import retention, writer
from megatron_deberta.checkpoint.layout import (
    COMMITTED_FILE,
    MANIFEST_FILE,
    UNCOMMITTED_FILE,
    checkpoints_dir,
    committed_steps,
    foreign_folders,
    leftovers,
    step_dir,
)
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.retention import Retention, delete_after, delete_expired
from megatron_deberta.errors import CheckpointError
from tests.support.checkpoints import save_alone

STEPS = [2, 4, 5, 6, 8, 10]


@pytest.mark.parametrize(
    ("last", "every", "good", "kept"),
    [
        (None, None, math.inf, STEPS),
        (1, None, math.inf, [10]),
        (2, 4, math.inf, [4, 8, 10]),
        (9, None, math.inf, STEPS),
        (1, None, 5, [5, 10]),
        (1, None, 7, [6, 10]),
        (1, None, 1, [10]),
        (1, 4, 7, [4, 6, 8, 10]),
    ],
)
def test_rules(last: int | None, every: int | None, good: float, kept: list[int]) -> None:
    rules = Retention(keep_last=last, keep_every=every, last_good_step=good)
    assert [step for step in STEPS if step not in rules.expired(STEPS)] == kept
    assert rules.expired([]) == []


def test_only_what_was_saved_up_to_now_is_looked_at(tmp_path: Path) -> None:
    for step in STEPS:
        save_alone(tmp_path, step)
    delete_expired(tmp_path, 6, Retention(keep_last=1, keep_every=4))
    assert committed_steps(tmp_path) == [4, 6, 8, 10]


def test_giving_up_later_ones_goes_from_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in STEPS:
        save_alone(tmp_path, step)
    removed, remove = [], shutil.rmtree

    def killed(path: Path) -> None:
        removed.append(path.name)
        if len(removed) == 2:
            raise KeyboardInterrupt
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        delete_after(tmp_path, 4)
    # A kill leaves complete checkpoints without a gap, and one hidden folder.
    assert committed_steps(tmp_path) == [2, 4, 5, 6]
    assert leftovers(tmp_path) == [checkpoints_dir(tmp_path) / ".deleting-step_00000008"]
    monkeypatch.undo()
    delete_after(tmp_path, 4)
    assert committed_steps(tmp_path) == [2, 4]


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in checkpoints_dir(run_dir).iterdir())


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def incomplete_copy(run_dir: Path, step: int, missing: str = COMMITTED_FILE) -> dict[str, bytes]:
    """Turn a new checkpoint into a copy that lacks some files; return what it contains."""
    folder = save_alone(run_dir, step)
    for path in (folder / COMMITTED_FILE, *folder.glob(missing)):
        path.unlink(missing_ok=True)
    return content(folder)


def uncommit(run_dir: Path, step: int) -> None:
    """Leave what a kill just before the commit leaves."""
    folder = save_alone(run_dir, step)
    (folder / COMMITTED_FILE).rename(folder / UNCOMMITTED_FILE)


@pytest.mark.parametrize("missing", [COMMITTED_FILE, MANIFEST_FILE, "*.safetensors", "*"])
def test_incomplete_copy_is_kept_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    copied = incomplete_copy(tmp_path, 7, missing)
    save_alone(tmp_path, 14, keep_last=1)
    assert content(step_dir(tmp_path, 7)) == copied
    assert f"{step_dir(tmp_path, 7)} has no COMMITTED" in caplog.text
    assert committed_steps(tmp_path) == [14]


def test_incomplete_copy_in_the_way_is_renamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        copied = incomplete_copy(tmp_path / "other", 7)
        copied["number"] = bytes(number)
        shutil.rmtree(step_dir(tmp_path, 7), ignore_errors=True)
        shutil.move(step_dir(tmp_path / "other", 7), step_dir(tmp_path, 7))
        (step_dir(tmp_path, 7) / "number").write_bytes(bytes(number))
        CheckpointReader(save_alone(tmp_path, 7)).verify()
        aside = step_dir(tmp_path, 7).with_name(f"step_00000007.aside-{number}")
        assert content(aside) == copied
        assert str(aside) in caplog.text
    save_alone(tmp_path, 8, keep_last=1)
    assert names(tmp_path) == ["step_00000007.aside-1", "step_00000007.aside-2", "step_00000008"]


def test_file_in_the_way_is_renamed(tmp_path: Path) -> None:
    checkpoints_dir(tmp_path).mkdir()
    step_dir(tmp_path, 7).write_text("notes")
    save_alone(tmp_path, 7)
    assert step_dir(tmp_path, 7).with_name("step_00000007.aside-1").read_text() == "notes"
    assert committed_steps(tmp_path) == [7]


def test_own_unfinished_saves_are_deleted(tmp_path: Path) -> None:
    uncommit(tmp_path, 7)
    for prefix in (".staging-", ".deleting-"):
        (checkpoints_dir(tmp_path) / f"{prefix}step_00000009").mkdir()
    assert len(leftovers(tmp_path)) == 3
    assert foreign_folders(tmp_path) == []
    save_alone(tmp_path, 14)
    assert names(tmp_path) == ["step_00000014"]


def test_hidden_folders_of_others_are_kept(tmp_path: Path) -> None:
    for name in (".staging-copy", ".deleting-step_7", ".snapshot"):
        (checkpoints_dir(tmp_path) / name).mkdir(parents=True)
    before = names(tmp_path)
    save_alone(tmp_path, 14)
    assert names(tmp_path) == [*before, "step_00000014"]


def test_failed_save_keeps_an_incomplete_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = incomplete_copy(tmp_path, 7)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_tensors", full)
    with pytest.raises(CheckpointError, match="No space"):
        save_alone(tmp_path, 14)
    assert names(tmp_path) == ["step_00000007"]
    assert content(step_dir(tmp_path, 7)) == copied


def test_kill_while_deleting_an_unfinished_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of it is still recognised, whichever files went first."""

    class Killed(BaseException):
        pass

    def killed_after_first_file(path: Path) -> None:
        (path / UNCOMMITTED_FILE).unlink()
        raise Killed

    uncommit(tmp_path, 7)
    with monkeypatch.context() as patch:
        patch.setattr(retention.shutil, "rmtree", killed_after_first_file)
        with pytest.raises(Killed):
            save_alone(tmp_path, 14)
    assert foreign_folders(tmp_path) == []
    save_alone(tmp_path, 14)
    assert names(tmp_path) == ["step_00000014"]


@pytest.mark.parametrize("change", [uncommit, save_alone])
def test_symbolic_link_goes_without_its_folder(
    tmp_path: Path, change: Callable[[Path, int], Any]
) -> None:
    """A checkpoint that lies on another disk; unfinished ones behind a link are not ours."""
    change(tmp_path / "disk", 7)
    checkpoints_dir(tmp_path).mkdir()
    elsewhere = step_dir(tmp_path / "disk", 7)
    step_dir(tmp_path, 7).symlink_to(elsewhere)
    before = content(elsewhere)
    for step in (14, 21):
        save_alone(tmp_path, step, keep_last=1)
    assert content(elsewhere) == before
    assert os.path.lexists(step_dir(tmp_path, 7)) == (change is uncommit)
    assert committed_steps(tmp_path) == [21]

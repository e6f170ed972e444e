"""Retention and deletion of checkpoints."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import checkpoints_dir, committed_steps, leftovers
from megatron_deberta.checkpoint.retention import Retention, delete_after, delete_expired
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

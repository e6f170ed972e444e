"""Generations of local checkpoints: saves of an abandoned path are void."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_deberta.checkpoint.local.parts import SaveId
from megatron_deberta.checkpoint.local.recovery import FILE_NAME, History
from megatron_deberta.errors import CheckpointError


def test_saves_are_valid_up_to_the_step_of_a_later_start() -> None:
    history = History.new().began(0).began(20).began(7).began(12)
    assert history.generation == 4
    valid = {
        (generation, step)
        for generation in range(1, 5)
        for step in (7, 8, 12, 13, 20, 30)
        if history.is_valid(SaveId(generation, step))
    }
    of_first_two = {(1, 7), (2, 7)}
    of_third = {(3, 7), (3, 8), (3, 12)}
    of_present = {(4, step) for step in (7, 8, 12, 13, 20, 30)}
    assert valid == of_first_two | of_third | of_present


def test_rollback_voids_all_saves() -> None:
    history = History.new().began(0).began(0)
    assert not history.is_valid(SaveId(1, 5))


def test_file_is_read_back(tmp_path: Path) -> None:
    assert History.of_run(tmp_path) is None
    history, checks = History.new().began(3), []
    history.write(tmp_path, lambda: checks.append(1))
    assert History.of_run(tmp_path) == history
    assert checks == [1]
    (tmp_path / FILE_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match="delete it to resume"):
        History.of_run(tmp_path)

"""Runs with phases and a batch ramp: resumption at any step, on any layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_deberta.data.sample_log import check_sample_log
from megatron_deberta.errors import EXIT_DONE
from tests.faults.phases import compare
from tests.support.jobs import Run, losses, records

PHASES = """train.phases=[
  steps=6 data.sequence_length=16 objective.mask_probability=0.3
    train.ramp_from=4 train.ramp_increment=2 train.ramp_steps=4,
  tokens=500 data.sequence_length=32 train.micro_batch_size=4 optimizer.learning_rate=1e-3]"""
COMMON = ("train.exit_step=0", "train.eval_every=2", "optimizer.warmup_steps=2")
PHASED = (PHASES, *COMMON, "data.sample_log=true")
SIZES = [4, 4, 6, 6, 8, 8, 8, 8]


def test_a_stopped_run_equals_the_uninterrupted_one(pretrain: Run, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert pretrain(*PHASED, run_dir="whole")[0] == EXIT_DONE
    # In the ramp, and at the end of the phase.
    for step in (3, 6, 8):
        assert pretrain(*PHASED, f"train.exit_step={step}")[0] == EXIT_DONE
        assert losses(tmp_path / "run") == losses(whole)[:step]
    check_sample_log(whole / "ledger", SIZES, 8)
    check_sample_log(tmp_path / "run" / "ledger", SIZES, 8)
    assert list(records(whole, "validation")) == [0, 2, 4, 6, 8]
    for step, record in records(whole, "validation").items():
        if step in (2, 4, 6, 8):
            assert records(tmp_path / "run", "validation")[step] == record
    trained = records(whole)
    assert [trained[step]["phase"] for step in (6, 7)] == [1, 2]
    assert [trained[step]["sequence_length"] for step in (6, 7)] == [16, 32]
    assert [trained[step]["global_batch_size"] for step in range(1, 9)] == SIZES


def test_phases_that_change_nothing_are_the_plain_run(pretrain: Run, tmp_path: Path) -> None:
    plain = ("train.steps=4", "train.exit_step=0", "optimizer.warmup_steps=2")
    assert pretrain(*plain, run_dir="plain")[0] == EXIT_DONE
    phases = 'train.phases=["steps=2", "tokens=384", "steps=1"]'
    assert pretrain(phases, "train.exit_step=0", "optimizer.warmup_tokens=768")[0] == EXIT_DONE
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


@pytest.mark.slow
def test_kills_and_moves_between_layouts(tmp_path: Path) -> None:
    result = compare(tmp_path, kills=2)
    assert len(result["kills"]["moved"]) == 2
    assert sum(result["losses"][-5:]) < sum(result["losses"][:5])

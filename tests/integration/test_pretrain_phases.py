"""Runs with phases and a batch ramp: resumption at any step, on any layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.cli.main import main
from megatron_deberta.data.sample_log import check_sample_log
from megatron_deberta.errors import EXIT_DONE
from tests.faults.phases import compare
from tests.support.jobs import Run, assert_same_checkpoints, losses, records

PHASES = """train.phases=[
  steps=6 data.sequence_length=16 objective.mask_probability=0.3
    train.ramp_from=4 train.ramp_increment=2 train.ramp_steps=4,
  tokens=500 data.sequence_length=32 data.train=OTHER train.micro_batch_size=4
    optimizer.learning_rate=1e-3]"""
COMMON = (
    "train.exit_step=null", "train.eval_every=2", "optimizer.warmup_steps=2",
    "train.micro_batch_size=2",
)  # fmt: skip
SIZES = [4, 4, 6, 6, 8, 8, 8, 8]


@pytest.fixture(scope="module")
def phased(run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the overrides of a run whose second phase has other text."""
    folder = tmp_path_factory.mktemp("other")
    lines = (run_yaml.parent / "docs.jsonl").read_text().splitlines(keepends=True)
    tokenizer = ["--tokenizer", str(run_yaml.parent / "tokenizer"), "--workers", "0"]
    for number, name in enumerate(("other", "held")):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(lines[number::4]))
        arguments = ["--input", str(path), "--output", str(folder / name)]
        assert main(["preprocess", *arguments, *tokenizer]) == 0
    validation = f"data.validation=[{folder}/held_text_document]"
    phases = PHASES.replace("OTHER", f"{folder}/other_text_document")
    return (phases, *COMMON, validation, "data.sample_log=true")


@pytest.mark.parametrize("objective", ["mlm", pytest.param("rtd", marks=pytest.mark.nightly)])
def test_a_stopped_run_equals_the_uninterrupted_one(
    pretrain: Run, phased: tuple[str, ...], tmp_path: Path, objective: str
) -> None:
    whole = tmp_path / "whole"
    keys = (*phased, f"objective.name={objective}", f"model.head={objective}")
    assert pretrain(*keys, run_dir="whole")[0] == EXIT_DONE
    # In the ramp, and at the end of the phase.
    for step in (3, 6, 8):
        assert pretrain(*keys, f"train.exit_step={step}")[0] == EXIT_DONE
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


@pytest.mark.slow
def test_phases_that_change_nothing_are_the_plain_run(pretrain: Run, tmp_path: Path) -> None:
    plain = ("train.steps=4", "train.exit_step=null", "optimizer.warmup_steps=2")
    assert pretrain(*plain, run_dir="plain")[0] == EXIT_DONE
    phases = 'train.phases=["steps=2", "tokens=384", "steps=1"]'
    assert pretrain(phases, "train.exit_step=null", "optimizer.warmup_tokens=768")[0] == EXIT_DONE
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


@pytest.mark.slow
def test_a_decay_from_a_stable_checkpoint_is_the_wsd_run(pretrain: Run, tmp_path: Path) -> None:
    common = ("train.exit_step=null", "optimizer.warmup_steps=1", "train.eval_every=null")
    wsd = ("optimizer.schedule=wsd", "optimizer.decay_steps=2", "train.steps=4", *common)
    assert pretrain(*wsd, run_dir="whole")[0] == EXIT_DONE
    stable = ("optimizer.schedule=constant", "train.steps=10", *common, "train.exit_step=2")
    assert pretrain(*stable, run_dir="stable")[0] == EXIT_DONE
    start = f"checkpoint.continue_from={tmp_path / 'stable'}"
    code, message = pretrain(*wsd, start)
    assert code == EXIT_DONE, message
    decayed, whole = records(tmp_path / "run"), records(tmp_path / "whole")
    assert list(decayed) == [3, 4]
    for step in decayed:
        assert decayed[step]["loss"] == whole[step]["loss"]
        assert decayed[step]["consumed_samples"] == whole[step]["consumed_samples"]
    assert_same_checkpoints(tmp_path / "run", tmp_path / "whole", 4)


def test_a_longer_context_of_loaded_weights(pretrain: Run, tmp_path: Path) -> None:
    assert pretrain("train.exit_step=1", run_dir="short")[0] == EXIT_DONE
    long = ("model.max_position_embeddings=96", "data.sequence_length=96", "train.exit_step=1")
    load = f"checkpoint.load_from={tmp_path / 'short'}"
    code, message = pretrain(*long, load)
    assert code == 2
    assert "checkpoint.extend_positions=repeat or =interpolate" in message
    freeze = "optimizer.freeze=mask_decoder.position"
    assert pretrain(*long, load, "checkpoint.extend_positions=repeat", freeze)[0] == EXIT_DONE
    short, after = (
        CheckpointReader(step_dir(tmp_path / name, 1)).tensor("mask_decoder.position.weight")
        for name in ("short", "run")
    )
    assert after[:48].equal(short)
    assert after[48:].equal(short)


def test_best_fit_and_a_warning_of_the_released_masking(
    pretrain: Run, run_yaml: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    released = ("objective.masking=microsoft", "objective.mask_probability=0.3")
    options = ("data.packing=best_fit", *released, "parallel.engine=plain", "data.num_workers=0")
    folder = f"train.run_dir={tmp_path / 'run'}"
    assert main(["pretrain", str(run_yaml), folder, *options, "train.exit_step=1"]) == EXIT_DONE
    printed = capfd.readouterr()
    assert "the end of a row is masked far less" in " ".join(printed.err.split())
    # The synthetic documents, a few tokens each, fill rows of 48 almost completely.
    filled = re.search(r"best_fit, rows of 48: [\d,]+ per epoch, (\d+\.\d+)% filled", printed.out)
    assert filled
    assert 80 < float(filled[1]) <= 100
    code, _ = pretrain("data.packing=best_fit", "train.exit_step=2")
    assert code == 2  # Another masking than that of the checkpoint.


@pytest.mark.nightly
def test_kills_and_moves_between_layouts(tmp_path: Path) -> None:
    result = compare(tmp_path, kills=2)
    assert len(result["kills"]["moved"]) == 2
    assert sum(result["losses"][-5:]) < sum(result["losses"][:5])

"""Invalid runs print one clear line, exit with the right code and leave no files."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.checkpoint.layout import checkpoints_dir, committed_steps, step_dir
from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE
from megatron_deberta.objectives import MaskedLanguageModel
from megatron_deberta.observe.metrics import read_metrics
from tests.support.jobs import Run

REFUSED = {
    "unknown key": ("model.hiden_size=3", "hidden_size"),
    "vocabulary below the tokenizer": ("model.vocab_size=300", "model.vocab_size=300 is smaller"),
    "batch that does not divide": ("train.global_batch_size=7", "train.global_batch_size=7"),
    "heads that do not divide": (
        "parallel.tensor_parallel_size=3",
        "parallel.tensor_parallel_size=3 does not divide model.num_heads=4",
    ),
    "ranks that do not divide": ("parallel.tensor_parallel_size=2", "does not divide world_size=1"),
    "a GPU that is not there": ("train.device=cuda", "train.device=cuda"),
    "no data": ("data.train=[]", "data.train is empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_settings(pretrain: Run, tmp_path: Path, case: str) -> None:
    override, message = REFUSED[case]
    code, error = pretrain(override)
    assert code == EXIT_USAGE
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "run").exists()


def test_missing_files(pretrain: Run, tmp_path: Path) -> None:
    for override in ("data.train=[/nowhere/shard]", "tokenizer.path=/nowhere/tokenizer"):
        code, error = pretrain(override)
        assert code == EXIT_USAGE
        assert error.count("\n") == 1
        assert "/nowhere" in error
    assert main(["pretrain", str(tmp_path / "missing.yaml")]) == EXIT_USAGE


def test_checkpoint_of_another_model_or_run(pretrain: Run, tmp_path: Path) -> None:
    assert pretrain() == (EXIT_DONE, "")
    before = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for override, old in (
        ("model.num_layers=3", "2"),
        ("train.seed=5", "1234"),
        ("data.sequence_length=32", "48"),
        ("optimizer.learning_rate=0.001", "0.005"),
    ):
        code, error = pretrain(override)
        key, _, value = override.partition("=")
        assert code == EXIT_USAGE
        assert f"{key}={value} but the checkpoint of step 2 was trained with {old}" in error
    assert pretrain("checkpoint.resume=never")[0] == EXIT_USAGE
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == before
    # With the flag the rate may change; the run itself is already finished.
    changed = ("optimizer.learning_rate=0.001", "--allow-config-change", "train.exit_step=3")
    assert pretrain(*changed) == (EXIT_DONE, "")
    assert committed_steps(tmp_path / "run") == [2, 3]
    assert pretrain(*changed) == (EXIT_DONE, "")


def test_ctrl_c_saves_and_says_where(
    pretrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    presses = [signal.SIGINT]

    forward = MaskedLanguageModel.forward

    def interrupted(*args: Any) -> Any:
        if presses:
            os.kill(os.getpid(), presses.pop())
        return forward(*args)

    monkeypatch.setattr(MaskedLanguageModel, "forward", interrupted)
    monkeypatch.setattr("sys.stdout", sys.stderr)
    code, shown = pretrain("train.exit_step=3")
    assert code == EXIT_INTERRUPTED
    assert committed_steps(tmp_path / "run") == [1]
    assert "stopped by Ctrl-C at step 1 of 60 after 0:00:" in shown
    assert f"checkpoint  {step_dir(tmp_path / 'run', 1)}\n" in shown
    assert "start the same command again" in shown
    assert "requeue" not in shown
    code, shown = pretrain("train.exit_step=2")
    assert code == EXIT_DONE
    assert f"run         {tmp_path / 'run'}, resuming from step 1\n" in shown
    assert "reached train.exit_step at step 2 of 60" in shown
    code, shown = pretrain("train.exit_step=2")
    assert code == EXIT_DONE
    assert "nothing left to train" in shown
    assert "raise train.exit_step" in shown


def test_full_disk_keeps_the_last_checkpoint(
    pretrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pretrain() == (EXIT_DONE, "")
    monkeypatch.setattr("megatron_deberta.checkpoint.writer.SPACE_MARGIN", 1e15)
    code, error = pretrain("train.exit_step=4")
    assert code == EXIT_FAILURE
    assert "step_00000004 was not saved" in error
    assert "MiB needed" in error
    # The save after step 3 is skipped; the last checkpoint must still be written.
    code, error = pretrain(
        "train.exit_step=4", "checkpoint.save_every=1", "checkpoint.on_failure=continue"
    )
    assert code == EXIT_FAILURE
    assert error.count("training continues without this checkpoint") == 1
    assert "step_00000004 was not saved" in error.splitlines()[-1]
    left = [path.name for path in checkpoints_dir(tmp_path / "run").iterdir()]
    assert left == ["step_00000002"]


@pytest.mark.slow
def test_consecutive_runs_in_one_process(
    pretrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    deepspeed = ("parallel.engine=deepspeed", "parallel.zero_stage=3")
    assert pretrain(*deepspeed)[0] == EXIT_DONE
    with monkeypatch.context() as patch:
        patch.setattr("megatron_deberta.checkpoint.writer.SPACE_MARGIN", 1e15)
        assert pretrain(*deepspeed, "train.exit_step=3")[0] == EXIT_FAILURE
    # Set by torch and DeepSpeed at import.
    of_libraries = {"PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"}
    assert {k: v for k, v in os.environ.items() if before.get(k) != v}.keys() <= of_libraries
    assert before.keys() <= os.environ.keys()
    assert pretrain(*deepspeed, "train.exit_step=3")[0] == EXIT_DONE
    assert committed_steps(tmp_path / "run") == [2, 3]


def test_baseline_and_validation_data_may_change(
    pretrain: Run, run_yaml: Path, tmp_path: Path
) -> None:
    def baselines() -> list[float]:
        records = read_metrics(tmp_path / "run" / "metrics.jsonl")
        return [record["unigram_loss"] for record in records if "unigram_loss" in record]

    for number, topics in enumerate((slice(0, 9), slice(9, 30))):
        lines = (run_yaml.parent / "docs.jsonl").read_text().splitlines()[topics]
        text = tmp_path / f"{number}.jsonl"
        text.write_text("\n".join(lines) + "\n")
        tokenizer, output = str(run_yaml.parent / "tokenizer"), str(tmp_path / f"v{number}")
        make = ["preprocess", "--input", str(text), "--tokenizer", tokenizer, "--workers", "0"]
        assert main([*make, "--output", output]) == 0
    first, second = (f"data.validation=[{tmp_path}/v{n}_text_document]" for n in (0, 1))
    assert pretrain(first)[0] == EXIT_DONE
    assert pretrain(first, "train.exit_step=3") == (EXIT_DONE, "")
    assert len(baselines()) == 1
    code, error = pretrain(second, "train.exit_step=4")
    assert code == EXIT_DONE
    assert "the validation set has changed: unigram loss" in error
    assert len(set(baselines())) == 2
    # A split of the training data would reduce the number of training documents.
    code, error = pretrain("data.validation=[]", "train.exit_step=5")
    assert code == EXIT_USAGE
    assert "data.train" in error


def test_dry_run_does_not_train(
    pretrain: Run, run_yaml: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["parallel.tensor_parallel_size=2", "cluster.nodes=2", "cluster.ranks_per_node=2"]
    arguments += ["train.micro_batch_size=2"]
    assert main(["pretrain", str(run_yaml), "--dry-run", *arguments]) == EXIT_DONE
    text = capfd.readouterr().out
    assert "ranks: 4 = 2 data-parallel x 2 tensor-parallel" in text
    assert "8 sequences = 2 data-parallel x 2 per micro batch x 2 accumulated" in text
    assert "encoder.layers.N.ffn.up.weight" in text
    assert not (tmp_path / "run").exists()
    assert "hidden_size: 32" in text

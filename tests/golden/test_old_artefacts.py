"""Files of commit c6955b0 can be read: its run, run file, shard, tokenizer and export.

``c6955b0/`` is a run of two tensor-parallel ranks, stopped at step 5 of 12. ``continued.json`` has
the metrics of its continuation on one rank, frozen when attention's dropout bits changed; without
that dropout they were the same before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_deberta.cli.main import main
from tests.golden.freeze import compare, metrics
from tests.support.selection import every

OLD = Path(__file__).with_name("c6955b0")
ONE_RANK = ("parallel.tensor_parallel_size=1", "parallel.sequence_parallel=false")
SHARD = "shards/docs_text_document"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copy the files to a folder that becomes the working directory.

    Paths are relative, except for the tokenizer's in manifests, which no longer exists.
    """
    copy = tmp_path / "old"
    shutil.copytree(OLD, copy)
    monkeypatch.chdir(copy)
    threads = torch.get_num_threads()
    yield copy
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def assert_metrics(run_dir: Path, name: str) -> None:
    expected: dict[str, Any] = json.loads((OLD / "continued.json").read_text())
    differences = compare({"metrics": expected[name]}, {"metrics": metrics(run_dir)}, exact=False)
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("config", every(2, ["run.yaml", "run/config.yaml"], ["slow"]))
def test_run_is_resumed(config: str, folder: Path) -> None:
    """From the original run file, and from the resolved config in the run's folder."""
    assert main(["pretrain", config, *ONE_RANK, "train.stop_after=0"]) == 0
    assert_metrics(folder / "run", "resumed")


def test_checkpoint_starts_another_run(folder: Path) -> None:
    source = "checkpoint.load_from=run/checkpoints/step_00000005"
    overrides = ("train.run_dir=new", source, "train.stop_after=2", *ONE_RANK)
    assert main(["pretrain", "run.yaml", *overrides]) == 0
    assert_metrics(folder / "new", "loaded")


def test_status_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5


def test_shard_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", SHARD, "--tokenizer", "tokenizer"]) == 0
    assert main(["inspect", "shards", SHARD, "--tokenizer", "tokenizer"]) == 0
    assert "9,059" in capsys.readouterr().out
    assert main(["inspect", "data", "run.yaml", "--num-samples", "1"]) == 0
    assert "Chichester" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["hf", "run", "run/checkpoints/step_00000005"])
def test_export_and_checkpoint_fill_masks(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [] if model == "hf" else ["--tokenizer", "tokenizer"]
    assert main(["fill-mask", model, "He said [MASK] was late.", "--top-k", "3", *arguments]) == 0
    assert "0.0077" in capsys.readouterr().out


def test_checkpoint_is_converted(folder: Path) -> None:
    """To the same export as by c6955b0, which is imported again."""
    arguments = ["--tokenizer", "tokenizer", "--to", "hf", "--output", "new"]
    assert main(["convert", "--checkpoint", "run", *arguments]) == 0
    old, new = (load_file(folder / name / "model.safetensors") for name in ("hf", "new"))
    assert old.keys() == new.keys()
    assert all(old[name].equal(new[name]) for name in old)
    old, new = (json.loads((folder / name / "config.json").read_text()) for name in ("hf", "new"))
    numbers = {key: value for key, value in old.items() if isinstance(value, (int, float))}
    assert numbers == {key: new.get(key) for key in numbers}
    tokenizers = [(folder / name / "tokenizer.json").read_bytes() for name in ("hf", "new")]
    assert tokenizers[0] == tokenizers[1]
    assert main(["convert", "--from", "hf", "hf", "--output", "imported"]) == 0

"""``split``, ``train-tokenizer`` and ``index`` on engines that their other tests do not use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_deberta.cli.main import main
from tests.support.duplicates import write_jsonl

MPIRUN = [
    str(Path(sys.executable).with_name("mpirun")), "-n", "3", "--allow-run-as-root",
    "--oversubscribe", sys.executable, "-m", "megatron_deberta",
]  # fmt: skip


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """Return the address of a Dask scheduler with two workers."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """Return several files, each of which is a unit."""
    return [
        write_jsonl(
            tmp_path / f"{first}.jsonl",
            [
                {"text": f"document {n} of words {n * n} and {n**3}"}
                for n in range(first, first + 600)
            ],
        )
        for first in range(0, 3000, 600)
    ]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def on_mpi(arguments: list[str]) -> None:
    done = subprocess.run([*MPIRUN, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_split(text: list[str], scheduler: str, tmp_path: Path) -> None:
    call = ["split", "--input", *text, "--output"]
    for name, options in (("local", ["--workers", "2"]), ("dask", ["--dask", scheduler])):
        assert main([*call, str(tmp_path / name), *options]) == 0
    on_mpi([*call, str(tmp_path / "mpi")])
    array = [*call, str(tmp_path / "array"), "--workers", "0"]
    # The last one publishes.
    for task in range(2):
        assert main([*array, "--array-task", f"{task}/2"]) == 0
    expected = files(tmp_path / "local")
    assert len(expected) > 2
    for name in ("dask", "mpi", "array"):
        assert files(tmp_path / name) == expected, name


def test_train_tokenizer_on_dask(text: list[str], scheduler: str, tmp_path: Path) -> None:
    call = ["train-tokenizer", "--input", *text, "--vocab-size", "300", "--output"]
    assert main([*call, str(tmp_path / "local"), "--workers", "0"]) == 0
    assert main([*call, str(tmp_path / "dask"), "--dask", scheduler]) == 0
    assert files(tmp_path / "dask").keys() == files(tmp_path / "local").keys()
    for name, content in files(tmp_path / "dask").items():
        if name.endswith(".model"):
            assert content == files(tmp_path / "local")[name]


@pytest.mark.slow
def test_index(text: list[str], scheduler: str, tmp_path: Path) -> None:
    """Indices of a million documents, as those of fewer are computed in memory."""
    source, tokenizer, shard = (tmp_path / name for name in ("many.jsonl", "tokenizer", "shard"))
    with source.open("w") as file:
        for number in range((1 << 20) + 10):
            file.write(f'{{"text": "document {number % 10}"}}\n')
    assert main([
        "train-tokenizer", "--input", *text, "--vocab-size", "300", "--output", str(tokenizer),
    ]) == 0  # fmt: skip
    assert main([
        "preprocess", "--input", str(source), "--tokenizer", str(tokenizer), "--output", str(shard),
    ]) == 0  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 3000, global_batch_size: 64, micro_batch_size: 8}\n")
    call = [
        "index", str(path), f"data.train=[{shard}_text_document]", "data.sequence_length=64",
        "model.vocab_size=auto", f"tokenizer.path={tokenizer}", "optimizer.warmup_steps=0",
    ]  # fmt: skip
    for name, options in (("local", ["--workers", "2"]), ("dask", ["--dask", scheduler])):
        assert main([*call, f"data.index_cache={tmp_path / name}", *options]) == 0
    on_mpi([*call, f"data.index_cache={tmp_path / 'mpi'}"])
    expected = files(tmp_path / "local")
    assert len(expected) > 3
    for name in ("dask", "mpi"):
        assert files(tmp_path / name) == expected, name

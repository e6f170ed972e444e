"""Every command for text writes the bytes of a single process on every engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import LocalCluster

from megatron_deberta.cli.main import main
from tests.support.duplicates import write_jsonl

MPIRUN = [
    str(Path(sys.executable).with_name("mpirun")), "-n", "3", "--allow-run-as-root",
    "--oversubscribe", sys.executable, "-m", "megatron_deberta",
]  # fmt: skip


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """Return the address of a Dask scheduler with two workers."""
    with LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


@pytest.fixture(scope="module")
def folder(tokenizer_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with several files and two shards."""
    folder = tmp_path_factory.mktemp("text")
    for first in range(0, 3000, 600):
        rows = range(first, first + 600)
        texts = [{"text": f"document {n} of words {n * n} and {n**3}"} for n in rows]
        write_jsonl(folder / f"{first}.jsonl", texts)
    for name, sources in (("a", ["0", "600"]), ("b", ["1200"])):
        make = ["preprocess", "--tokenizer", tokenizer_dir, "--workers", "0", "--input"]
        make += [str(folder / f"{source}.jsonl") for source in sources]
        assert main([*make, "--output", str(folder / name)]) == 0
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def on_mpi(arguments: list[str]) -> None:
    done = subprocess.run([*MPIRUN, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "preprocess",
        pytest.param("deduplicate", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("split", "merge", "train-tokenizer")
        ),
    ],
)
def test_engines_change_nothing(
    command: str, folder: Path, tokenizer_dir: str, scheduler: str, tmp_path: Path
) -> None:
    call = [command, "--input", *(str(path) for path in sorted(folder.glob("*.jsonl")))]
    options = {
        "preprocess": ["--tokenizer", tokenizer_dir, "--unit-mb", "0.02"],
        "train-tokenizer": ["--vocab-size", "300"],
    }
    call += options.get(command, [])
    if command == "merge":
        call = [command, *(str(folder / f"{name}_text_document") for name in "ab")]
    for engine, chosen in (("local", ["--workers", "0"]), ("dask", ["--dask", scheduler])):
        assert main([*call, "--output", str(tmp_path / engine / "out"), *chosen]) == 0
    on_mpi([*call, "--output", str(tmp_path / "mpi" / "out")])
    expected = files(tmp_path / "local")
    assert len(expected) > 2
    for engine in ("dask", "mpi"):
        assert files(tmp_path / engine) == expected, engine


@pytest.mark.nightly
def test_dask_goes_on_without_a_killed_worker(
    folder: Path, tokenizer_dir: str, tmp_path: Path
) -> None:
    call = ["preprocess", "--input", str(folder / "0.jsonl"), "--unit-mb", "0.002"]
    call += ["--tokenizer", tokenizer_dir, "--output"]
    assert main([*call, str(tmp_path / "whole" / "c"), "--workers", "0"]) == 0

    def kill(victim: int) -> None:
        while not list(tmp_path.glob("out/c.unfinished/*/done/0*")):
            time.sleep(0.001)
        os.kill(victim, signal.SIGKILL)

    with LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None) as cluster:
        victim = next(iter(cluster.workers.values())).pid
        thread = threading.Thread(target=kill, args=(victim,), daemon=True)
        thread.start()
        assert main([*call, str(tmp_path / "out" / "c"), "--dask", cluster.scheduler_address]) == 0
        thread.join(60)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.nightly
def test_index(tokenizer_dir: str, scheduler: str, tmp_path: Path) -> None:
    """Indices of a million documents, as those of fewer are computed in memory."""
    source, tokenizer, shard = tmp_path / "many.jsonl", tokenizer_dir, tmp_path / "shard"
    with source.open("w") as file:
        for number in range((1 << 20) + 10):
            file.write(f'{{"text": "document {number % 10}"}}\n')
    assert main([
        "preprocess", "--input", str(source), "--tokenizer", tokenizer, "--output", str(shard),
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

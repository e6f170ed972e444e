"""Commands for text as job arrays and with Dask workers on two nodes write the same bytes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.tokenizer.training import train_sentencepiece
from tests.slurm.virtual_cluster import VirtualCluster, wait_until
from tests.support.duplicates import contents, make_corpus
from tests.support.jobs import ROOT
from tests.support.machine_text import documents

SECONDS = 120.0
ONE_WORKER = ("--workers", "1")


@pytest.fixture
def make(tmp_path: Path) -> list[str]:
    """Return the command without its output."""
    texts = documents()[:60]
    train_sentencepiece(texts[:40], str(tmp_path / "tokenizer"), vocab_size=500)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [
        "preprocess", "--input", str(corpus), "--tokenizer", str(tmp_path / "tokenizer"),
        "--unit-mb", "0.02", "--output",
    ]  # fmt: skip


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def run_array(cluster: VirtualCluster, command: list[str], tasks: str, log: Path) -> None:
    line = f"PYTHONPATH={ROOT} {shlex.join(command)}"
    array = cluster.run(
        "sbatch", "--parsable", f"--array={tasks}", "--exclusive", f"--output={log}-%a",
        "--wrap", line,
    )  # fmt: skip
    wait_until(
        lambda: not cluster.run("squeue", "-h", "-j", array.strip(), check=False).strip(),
        SECONDS,
        "the end of the array",
    )


@pytest.mark.slow
def test_the_tasks_of_an_array_do_the_share_of_one_that_fails(
    cluster: VirtualCluster, make: list[str], tmp_path: Path
) -> None:
    assert main([*make, str(tmp_path / "whole" / "c"), *ONE_WORKER]) == 0
    start = [sys.executable, "-m", "megatron_deberta", *make]
    command = [*start, str(tmp_path / "out" / "c"), *ONE_WORKER, "--executor", "slurm-array"]
    # In the first array, task 1 of 0, 1 and 2 ends before it does its share.
    broken = ["sh", "-c", f'test "$SLURM_ARRAY_TASK_ID" = 1 || exec {shlex.join(command)}']
    again = [*start, str(tmp_path / "again" / "c"), *ONE_WORKER]
    for name, line in (("out", broken), ("again", again)):
        run_array(cluster, line, "0-2", tmp_path / "log")
        logs = "".join(Path(f"{tmp_path}/log-{task}").read_text() for task in range(3))
        assert logs.count(": 60 documents") >= 1, logs
        assert shards(tmp_path / name) == shards(tmp_path / "whole")


@pytest.mark.nightly
def test_deduplicate_as_an_array(cluster: VirtualCluster, tmp_path: Path) -> None:
    make = ["deduplicate", "--input", *make_corpus(tmp_path), *ONE_WORKER, "--output"]
    assert main([*make, str(tmp_path / "whole")]) == 0
    command = [sys.executable, "-m", "megatron_deberta", *make, str(tmp_path / "out")]
    run_array(cluster, [*command, "--executor", "slurm-array"], "0-2", tmp_path / "log")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.nightly
def test_dask_workers_on_two_nodes(
    cluster: VirtualCluster, make: list[str], tmp_path: Path
) -> None:
    assert main([*make, str(tmp_path / "whole" / "c"), *ONE_WORKER]) == 0
    file = tmp_path / "scheduler.json"
    scheduler = subprocess.Popen(
        [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard",
         "--host", "127.0.0.1", "--scheduler-file", str(file)],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    worker = [
        sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(file),
        "--nworkers", "2", "--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1",
        "--local-directory", str(tmp_path),
    ]  # fmt: skip
    dedup = ["deduplicate", "--input", *make_corpus(tmp_path), "--output"]
    assert main([*dedup, str(tmp_path / "unique"), "--workers", "0"]) == 0
    try:
        wait_until(file.exists, SECONDS, "the scheduler")
        line = f"PYTHONPATH={ROOT} srun --ntasks-per-node=1 {shlex.join(worker)}"
        log = str(tmp_path / "workers")
        number = cluster.run("sbatch", "--parsable", "-N2", f"--output={log}", "--wrap", line)
        assert main([*make, str(tmp_path / "out" / "c"), "--dask", str(file)]) == 0
        assert main([*dedup, str(tmp_path / "dask"), "--dask", str(file)]) == 0
        cluster.run("scancel", number.strip())
    finally:
        scheduler.kill()
        scheduler.wait()
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")
    assert contents(tmp_path / "dask") == contents(tmp_path / "unique")

"""Every engine writes the bytes of a single process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.cli.main import main
from tests.unit.text.preprocess.test_preprocess_pipeline import UNIT_BYTES, build, shards


def arguments(corpus: str, tokenizer_dir: str, output: Path) -> list[str]:
    return [
        "preprocess", "--input", corpus, "--tokenizer", tokenizer_dir,
        "--unit-mb", str(UNIT_BYTES / 1e6), "--output", str(output / "c"),
    ]  # fmt: skip


def test_ranks_of_mpirun_share_the_work(corpus: str, tokenizer_dir: str, tmp_path: Path) -> None:
    build(corpus, tokenizer_dir, tmp_path / "whole")
    mpirun = Path(sys.executable).with_name("mpirun")
    done = subprocess.run(
        [
            str(mpirun), "-n", "4", "--allow-run-as-root", "--oversubscribe",
            sys.executable, "-m", "megatron_deberta",
            *arguments(corpus, tokenizer_dir, tmp_path / "out"),
        ],
        capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(b"60 documents") == 1
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")


@pytest.fixture(scope="module")
def dask_cluster() -> Iterator[Any]:
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None) as cluster:
        yield cluster


def test_dask_workers_share_the_work(
    dask_cluster: Any, corpus: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    build(corpus, tokenizer_dir, tmp_path / "whole")
    make = arguments(corpus, tokenizer_dir, tmp_path / "out")
    assert main([*make, "--dask", dask_cluster.scheduler_address]) == 0
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")


def test_dask_goes_on_without_a_killed_worker(
    dask_cluster: Any, corpus: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    build(corpus, tokenizer_dir, tmp_path / "whole")
    make = arguments(corpus, tokenizer_dir, tmp_path / "out")
    victim = next(iter(dask_cluster.workers.values())).pid

    def kill() -> None:
        done = Path(f"{tmp_path}/out/c.unfinished")
        while not list(done.glob("*/done/0*")):
            time.sleep(0.001)
        os.kill(victim, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    assert main([*make, "--unit-mb", "0.002", "--dask", dask_cluster.scheduler_address]) == 0
    thread.join(60)
    build(corpus, tokenizer_dir, tmp_path / "whole")
    for end in ("bin", "idx"):
        name = f"c_text_document.{end}"
        assert shards(tmp_path / "out")[name] == shards(tmp_path / "whole")[name]

"""Every engine writes the bytes of a single process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_deberta.cli.main import main
from tests.support.duplicates import contents, run


@pytest.mark.parametrize("workers", [1, 3])
def test_processes_change_nothing(corpus: list[str], tmp_path: Path, workers: int) -> None:
    for count in (0, workers):
        run(corpus, tmp_path / str(count), workers=count, unit_bytes=20_000)
    assert contents(tmp_path / "0") == contents(tmp_path / str(workers))


def test_ranks_of_mpirun_change_nothing(corpus: list[str], tmp_path: Path) -> None:
    call = ["deduplicate", "--input", *corpus, "--output"]
    assert main([*call, str(tmp_path / "whole"), "--workers", "0"]) == 0
    mpirun = Path(sys.executable).with_name("mpirun")
    done = subprocess.run(
        [
            str(mpirun), "-n", "4", "--allow-run-as-root", "--oversubscribe",
            sys.executable, "-m", "megatron_deberta", *call, str(tmp_path / "out"),
        ],
        capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(b"240 documents = 160 kept") == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_dask_workers_change_nothing(corpus: list[str], tmp_path: Path) -> None:
    from distributed import LocalCluster

    call = ["deduplicate", "--input", *corpus, "--output"]
    assert main([*call, str(tmp_path / "whole"), "--workers", "0"]) == 0
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        address = cluster.scheduler_address
        assert main([*call, str(tmp_path / "out"), "--dask", address]) == 0
        # Workers that outlive a run do another one.
        again = [*call, str(tmp_path / "exact"), "--exact-only"]
        assert main([*again, "--dask", address]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert main([*again, "--workers", "0", "--force"]) == 0

"""Start-up with torchrun, mpirun and the variables of srun, and the rank grid."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.distributed.topology import init_process_groups, shutdown
from tests.support.jobs import free_port
from tests.support.ranks import RankPool, grid, run_ranks

ROOT = Path(__file__).resolve().parents[2]
JOB = """
import sys, torch, torch.distributed as dist
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.distributed.topology import init_process_groups, shutdown
environment = read_environment()
groups = init_process_groups(2, torch.device("cpu"), 1.0, environment)
try:
    total = torch.tensor([groups.rank + 1.0])
    dist.all_reduce(total, group=groups.tp_group)
    sys.stdout.write(f"<{environment.launcher} {groups.rank} {groups.tp_rank} {total.item()}>")
finally:
    shutdown()
"""
"""Program of the ranks of a two-rank job."""
TWO_NODES = """
import os
os.environ.update(OMPI_COMM_WORLD_LOCAL_SIZE="1", OMPI_COMM_WORLD_LOCAL_RANK="0")
""" + JOB.replace("groups(2,", "groups(1,").replace("tp_group", "dp_group").replace(
    "groups.tp_rank", "groups.dp_rank"
)
"""The program with one rank per node, so that rank 0's address is broadcast over MPI."""


def _start(*command: str, **variables: str) -> list[str]:
    dropped = re.compile(r"(RANK|LOCAL_|WORLD_SIZE|MASTER_|SLURM_|OMPI_|PMI)")
    kept = {k: v for k, v in os.environ.items() if not dropped.match(k)}
    done = subprocess.run(
        command,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"<(.*?)>", done.stdout))


def _expected(launcher: str) -> list[str]:
    return [f"{launcher} 0 0 3.0", f"{launcher} 1 1 3.0"]


# ``pretrain`` on one node: tests/integration/test_pretrain_ranks.py.
def test_mpirun_on_two_nodes() -> None:
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    assert mpirun is not None, "mpirun is missing; install requirements-dev.txt"
    options = ("--allow-run-as-root", "--oversubscribe", "-n", "2")
    assert _start(mpirun, *options, sys.executable, "-c", TWO_NODES) == _expected("mpirun")


def run_as_srun(rank: int, port: int) -> list[int]:
    os.environ.update(
        SLURM_PROCID=str(rank), SLURM_NTASKS="2", SLURM_LOCALID=str(rank), SLURM_NODEID="0",
        SLURM_STEP_ID="0", SLURM_JOB_ID="4", SLURM_STEP_TASKS_PER_NODE="2",
        SLURM_STEP_NODELIST="localhost", MASTER_PORT=str(port),
    )  # fmt: skip
    before = dict(os.environ)
    groups = init_process_groups(1, torch.device("cpu"), 1.0, read_environment())
    total = torch.tensor([rank + 1])
    dist.all_reduce(total, group=groups.dp_group)
    shutdown()
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    return [groups.dp_rank, groups.dp_size, int(total)]


def test_srun_variables() -> None:
    port = free_port()
    assert run_ranks(run_as_srun, 2, port, start_distributed=False) == [[0, 2, 3], [1, 2, 3]]


def run_grid(rank: int, tp_size: int) -> list[object]:
    groups = grid(tp_size)
    both = (groups.tp_group, groups.dp_group)
    assert [group is None for group in both] == [groups.tp_size == 1, groups.dp_size == 1]
    numbers = (groups.rank, groups.tp_rank, groups.dp_rank)
    sizes = (groups.world_size, groups.tp_size, groups.dp_size)
    members = [[groups.rank] if g is None else dist.get_process_group_ranks(g) for g in both]
    with pytest.raises(AttributeError):
        groups.rank = 9  # type: ignore[misc]
    return [numbers, sizes, replace(groups).device.type, *members]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_tensor_parallel_ranks_are_neighbours(four_ranks: RankPool, tp_size: int) -> None:
    for rank, result in enumerate(four_ranks.run(run_grid, tp_size)):
        dp_rank, tp_rank = divmod(rank, tp_size)
        assert result == [
            (rank, tp_rank, dp_rank),
            (4, tp_size, 4 // tp_size),
            "cpu",
            list(range(dp_rank * tp_size, (dp_rank + 1) * tp_size)),
            list(range(tp_rank, 4, tp_size)),
        ]

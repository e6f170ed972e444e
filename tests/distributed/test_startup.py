"""Start-up with mpirun and the variables of srun, and the rank grid."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.distributed.topology import init_process_groups, shutdown
from tests.support.jobs import free_port, run_mpi
from tests.support.ranks import RankPool, grid, run_ranks

PROGRAM = """
import os, sys, torch, torch.distributed as dist
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.distributed.topology import init_process_groups, shutdown
os.environ.update(OMPI_COMM_WORLD_LOCAL_SIZE="1", OMPI_COMM_WORLD_LOCAL_RANK="0")
environment = read_environment()
groups = init_process_groups(1, torch.device("cpu"), 1.0, environment)
try:
    total = torch.tensor([groups.rank + 1.0])
    dist.all_reduce(total, group=groups.dp_group)
    sys.stdout.write(f"<{environment.launcher} {groups.rank} {groups.dp_rank} {total.item()}>")
finally:
    shutdown()
"""
"""Program of two ranks, each on a node of its own: rank 0's address is broadcast over MPI."""


# ``pretrain`` on one node: tests/integration/test_pretrain_ranks.py.
def test_mpirun_on_two_nodes() -> None:
    printed = run_mpi(sys.executable, "-c", PROGRAM)
    found = sorted(re.findall(r"<(.*?)>", printed))
    assert found == ["mpirun 0 0 3.0", "mpirun 1 1 3.0"]


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

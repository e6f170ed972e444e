"""Which rank this process is, read from whatever started it.

Owns the variables of torchrun, srun (SLURM), mpirun (Open MPI, and MPICH's and Intel's Hydra) and
the case of none of them. Refuses to start anything: see ``topology``.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_deberta.errors import TopologyError

_FIRST_PORT, _NUM_PORTS = 12000, 20000
"""Derived ports stay below Linux's ephemeral range (32768 on)."""


@dataclass(frozen=True)
class RankEnvironment:
    """One process of a job and where its processes meet."""

    launcher: str
    """``torchrun``, ``srun``, ``mpirun`` or ``none``."""
    rank: int
    """This process among all."""
    world_size: int
    """All processes of the job."""
    local_rank: int
    """This process among those of its node."""
    local_world_size: int
    """Processes on this node."""
    master_address: str
    """Host of rank 0."""
    master_port: int
    """Port on which rank 0 listens."""

    def __post_init__(self) -> None:
        """Check that the numbers fit together.

        Raises:
            TopologyError: they do not.
        """
        if not 0 <= self.rank < self.world_size:
            raise TopologyError(
                f"{self.launcher} says rank {self.rank} of {self.world_size}; clear stale rank "
                "variables from the environment and start the job again"
            )
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            raise TopologyError(
                f"{self.launcher} says local rank {self.local_rank} of {self.local_world_size} "
                f"in a job of {self.world_size}; clear stale rank variables from the environment "
                "and start the job again"
            )


def read_environment(variables: Mapping[str, str] | None = None) -> RankEnvironment:
    """Find this process's rank.

    The innermost launcher counts: torchrun inside srun is torchrun, mpirun inside an allocation is
    mpirun. Under an mpirun over several nodes without ``MASTER_ADDR`` the call is collective
    (mpi4py broadcasts rank 0's address).

    Args:
        variables: environment to read; the process's own by default.

    Returns:
        The rank and meeting point; one process where nothing started us.

    Raises:
        TopologyError: variables are missing, are not numbers or contradict each other.
    """
    env = os.environ if variables is None else variables
    if "RANK" in env or "LOCAL_RANK" in env:
        return _from_torchrun(env)
    if "OMPI_COMM_WORLD_RANK" in env:
        return _from_mpi(
            env,
            rank="OMPI_COMM_WORLD_RANK",
            size="OMPI_COMM_WORLD_SIZE",
            local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
            local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        )
    # srun sets PMI_RANK as well, but not Hydra's local numbers.
    if "PMI_RANK" in env and "MPI_LOCALRANKID" in env:
        return _from_mpi(
            env,
            rank="PMI_RANK",
            size="PMI_SIZE",
            local_rank="MPI_LOCALRANKID",
            local_size="MPI_LOCALNRANKS",
        )
    if "SLURM_PROCID" in env:
        return _from_slurm(env)
    return RankEnvironment("none", 0, 1, 0, 1, "127.0.0.1", _FIRST_PORT)


def first_host(node_list: str) -> str:
    """First host of a SLURM node list: ``gpu[003-006,9],login1`` gives ``gpu003``.

    Raises:
        TopologyError: the list names no host.
    """
    first = re.match(r"(?:[^,\[\]\s]|\[[^\[\]]+\])+", node_list)
    if first is None:
        raise TopologyError(
            f"SLURM_JOB_NODELIST={node_list!r} names no host; set MASTER_ADDR to rank 0's host"
        )
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _number(env: Mapping[str, str], name: str, launcher: str) -> int:
    value = env.get(name)
    if value is None:
        raise TopologyError(
            f"{launcher} left {name} unset; start the job through {launcher}, or clear its other "
            "variables to run one process"
        )
    try:
        return int(value)
    except ValueError:
        raise TopologyError(f"{name}={value!r} is not a number; {launcher} should set it") from None


def _port(env: Mapping[str, str], job: str) -> int:
    """``MASTER_PORT``, or one that every rank of a job derives alike and other jobs unlikely do."""
    if "MASTER_PORT" in env:
        return _number(env, "MASTER_PORT", "MASTER_ADDR")
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _from_torchrun(env: Mapping[str, str]) -> RankEnvironment:
    rank, world_size = _number(env, "RANK", "torchrun"), _number(env, "WORLD_SIZE", "torchrun")
    if world_size > 1 and "MASTER_ADDR" not in env:
        raise TopologyError(
            f"RANK={rank} and WORLD_SIZE={world_size} without MASTER_ADDR; start the job through "
            "torchrun, or set MASTER_ADDR and MASTER_PORT"
        )
    alone = world_size == 1 and "MASTER_PORT" not in env
    return RankEnvironment(
        launcher="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK", "torchrun"),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", "torchrun"),
        master_address=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_FIRST_PORT if alone else _number(env, "MASTER_PORT", "torchrun"),
    )


def _from_slurm(env: Mapping[str, str]) -> RankEnvironment:
    world_size = _number(env, "SLURM_NTASKS", "srun")
    if "SLURM_STEP_ID" not in env and world_size > 1:
        # The batch script itself: it has SLURM_PROCID=0, but nobody starts the other ranks.
        raise TopologyError(
            f"SLURM_NTASKS={world_size} but this process was not started by srun; put srun before "
            "the command, or submit with --ntasks=1"
        )
    rank = _number(env, "SLURM_PROCID", "srun")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    address = env.get("MASTER_ADDR") or (first_host(nodes) if nodes else "")
    if world_size > 1 and not address:
        raise TopologyError(
            "srun left SLURM_JOB_NODELIST unset; set MASTER_ADDR to the host of rank 0"
        )
    job = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    return RankEnvironment(
        launcher="srun",
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID", "srun"),
        local_world_size=_slurm_tasks_on_node(env, world_size),
        master_address=address or "127.0.0.1",
        master_port=_port(env, job),
    )


def _slurm_tasks_on_node(env: Mapping[str, str], world_size: int) -> int:
    """Ranks on this node from ``4(x2),3`` (two nodes with 4 tasks, then one with 3)."""
    layout = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if layout is None:
        return world_size
    counts: list[int] = []
    for item in layout.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise TopologyError(
                f"SLURM_TASKS_PER_NODE={layout!r} is not SLURM's 4(x2),3 form; start through srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(env, "SLURM_NODEID", "srun") if len(counts) > 1 else 0
    if not 0 <= node < len(counts):
        raise TopologyError(
            f"SLURM_NODEID={node} is beyond the {len(counts)} nodes of SLURM_TASKS_PER_NODE="
            f"{layout!r}; clear stale SLURM variables and start through srun"
        )
    return counts[node]


def _from_mpi(
    env: Mapping[str, str], *, rank: str, size: str, local_rank: str, local_size: str
) -> RankEnvironment:
    world_size = _number(env, size, "mpirun")
    local_world_size = _number(env, local_size, "mpirun")
    if "MASTER_ADDR" in env:
        address, port = env["MASTER_ADDR"], _port(env, _mpi_job(env))
    elif local_world_size == world_size:
        address, port = "127.0.0.1", _port(env, _mpi_job(env))
    else:
        address, port = _broadcast_master(world_size)
    return RankEnvironment(
        launcher="mpirun",
        rank=_number(env, rank, "mpirun"),
        world_size=world_size,
        local_rank=_number(env, local_rank, "mpirun"),
        local_world_size=local_world_size,
        master_address=address,
        master_port=port,
    )


def _mpi_job(env: Mapping[str, str]) -> str:
    """A name that the ranks of one mpirun share; its children share a parent where none is set."""
    return env.get("PMIX_NAMESPACE") or str(os.getppid())


def _broadcast_master(world_size: int) -> tuple[str, int]:
    """Rank 0's host and a free port on it, over MPI; as bytes, not as pickled objects."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TopologyError(
            f"mpirun over several nodes without MASTER_ADDR, and mpi4py does not load ({error}); "
            "pass -x MASTER_ADDR=<host of rank 0> (Open MPI) or -genv MASTER_ADDR (Hydra)"
        ) from None
    comm = MPI.COMM_WORLD
    if comm.Get_size() != world_size:
        raise TopologyError(
            f"mpi4py sees {comm.Get_size()} ranks where mpirun started {world_size}: it was built "
            "for another MPI; set MASTER_ADDR, or install mpi4py for this mpirun"
        )
    message = bytearray(512)
    if comm.Get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            text = f"{socket.gethostname()} {probe.getsockname()[1]}".encode()
        message[: len(text)] = text
    comm.Bcast([message, MPI.BYTE], root=0)
    host, port = message.rstrip(b"\0").decode().split()
    return host, int(port)

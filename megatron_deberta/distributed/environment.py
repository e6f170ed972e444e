"""Rank and rendezvous address of this process, from the launcher's environment variables.

Supported launchers: torchrun, srun (SLURM), mpirun (Open MPI, and Hydra of MPICH and Intel MPI),
or none.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_deberta.errors import TopologyError

# Range of derived ports, below Linux's ephemeral ports (from 32768)
_FIRST_PORT, _NUM_PORTS = 12000, 20000
_LAST_PORT = 65535

# SLURM's steps of batch scripts, interactive shells and the like have reserved numbers.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = tuple(
    f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
# Variables of the rank, world size, local rank and local world size, by launcher
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class RankEnvironment:
    """Rank of this process and the address at which the ranks connect.

    Attributes:
        launcher: ``torchrun``, ``srun``, ``mpirun`` or ``none``.
        master_address: host of rank 0.
        master_port: port on which rank 0 listens.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int

    def __post_init__(self) -> None:
        """Check the ranks against the sizes.

        Raises:
            TopologyError: they are inconsistent.
        """
        problem = ""
        if not 0 <= self.rank < self.world_size:
            problem = f"rank {self.rank} of {self.world_size}"
        elif not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            problem = (
                f"local rank {self.local_rank} of {self.local_world_size} "
                f"in a job of {self.world_size}"
            )
        if problem:
            raise TopologyError(
                f"inconsistent variables of {self.launcher}: {problem}; clear stale rank "
                "variables from the environment and start the job again"
            )


def read_environment(variables: Mapping[str, str] | None = None) -> RankEnvironment:
    """Read this process's rank from the variables of the innermost launcher.

    Under an mpirun over several nodes without ``MASTER_ADDR`` the call is collective (mpi4py
    broadcasts rank 0's address).

    Args:
        variables: environment to read; the process's own by default.

    Returns:
        The rank and address; a single process without a launcher.

    Raises:
        TopologyError: variables are missing, are not numbers or contradict each other.
    """
    given = os.environ if variables is None else variables
    # Wrappers of schedulers set variables that they do not know to the empty string.
    env = {name: value for name, value in given.items() if value.strip()}
    if "RANK" in env or "LOCAL_RANK" in env:
        return _from_torchrun(env)
    if "OMPI_COMM_WORLD_RANK" in env:
        return _from_mpi(env, _OPEN_MPI)
    # srun sets PMI_RANK, too, but not Hydra's local numbers.
    if "PMI_RANK" in env and "MPI_LOCALRANKID" in env:
        return _from_mpi(env, _HYDRA)
    if "SLURM_PROCID" in env:
        return _from_slurm(env)
    return RankEnvironment("none", 0, 1, 0, 1, "127.0.0.1", _FIRST_PORT)


def first_host(node_list: str) -> str:
    """Return the first host of a SLURM node list: ``gpu[003-006,9],login1`` -> ``gpu003``.

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
            f"{name} is not set, but other variables of {launcher} are; start the job with "
            f"{launcher}, or clear its variables to run a single process"
        )
    try:
        return int(value)
    except ValueError:
        raise TopologyError(
            f"{name}={value!r} is not a number; start the job with {launcher}"
        ) from None


def _numbers(
    env: Mapping[str, str], names: Sequence[str], launcher: str
) -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size."""
    rank, world_size, local_rank, local_world_size = (_number(env, n, launcher) for n in names)
    return rank, world_size, local_rank, local_world_size


def _port(env: Mapping[str, str], job: str = "") -> int:
    """``MASTER_PORT``, or a port derived from the job's name; without a name, the first one."""
    if "MASTER_PORT" not in env:
        return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
    text = env["MASTER_PORT"].strip()
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= _LAST_PORT:
        raise TopologyError(
            f"MASTER_PORT={text!r} is not a port from 1 to {_LAST_PORT}; set it to a free one, or "
            "unset it where the launcher chooses one"
        )
    return int(text)


def _from_torchrun(env: Mapping[str, str]) -> RankEnvironment:
    numbers = _numbers(env, _TORCHRUN, "torchrun")
    rank, world_size, *_ = numbers
    if world_size > 1 and "MASTER_ADDR" not in env:
        raise TopologyError(
            f"RANK={rank} and WORLD_SIZE={world_size} without MASTER_ADDR; start the job with "
            "torchrun, or set MASTER_ADDR and MASTER_PORT"
        )
    if world_size > 1 and "MASTER_PORT" not in env:
        # Raises an error: the other ranks would not know a port that is chosen here.
        _number(env, "MASTER_PORT", "torchrun")
    return RankEnvironment("torchrun", *numbers, env.get("MASTER_ADDR", "127.0.0.1"), _port(env))


def _from_slurm(env: Mapping[str, str]) -> RankEnvironment:
    # Whether srun started this process, not a batch script or an interactive shell
    in_step = (
        "SLURM_STEP_ID" in env and _number(env, "SLURM_STEP_ID", "srun") < _FIRST_RESERVED_STEP
    )
    # A job that was submitted without --ntasks does not have the variable.
    world_size = _number(env, "SLURM_NTASKS", "srun") if in_step or "SLURM_NTASKS" in env else 1
    if not in_step and world_size > 1:
        # The batch script itself has SLURM_PROCID=0, but the other ranks are never started.
        raise TopologyError(
            f"SLURM_NTASKS={world_size} but this process was not started by srun; put srun before "
            "the command, or submit with --ntasks=1"
        )
    rank = _number(env, "SLURM_PROCID", "srun")
    is_alone = not in_step or world_size == 1
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    address = env.get("MASTER_ADDR") or (first_host(nodes) if nodes else "")
    if world_size > 1 and not address:
        raise TopologyError("SLURM_JOB_NODELIST is not set; set MASTER_ADDR to the host of rank 0")
    job = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    return RankEnvironment(
        launcher="srun",
        rank=rank,
        world_size=world_size,
        local_rank=0 if is_alone else _number(env, "SLURM_LOCALID", "srun"),
        # A batch script's variable has the tasks that would fit into the node.
        local_world_size=1 if is_alone else _slurm_tasks_on_node(env, world_size),
        master_address=address or "127.0.0.1",
        master_port=_port(env, job),
    )


def _slurm_tasks_on_node(env: Mapping[str, str], world_size: int) -> int:
    """Number of ranks on this node; ``4(x2),3`` is two nodes with 4 tasks, then one with 3."""
    layout = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if layout is None:
        return world_size
    counts: list[int] = []
    for item in layout.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise TopologyError(
                f"SLURM_TASKS_PER_NODE={layout!r} does not have the form 4(x2),3; "
                "start the job with srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(env, "SLURM_NODEID", "srun") if len(counts) > 1 else 0
    if not 0 <= node < len(counts):
        raise TopologyError(
            f"SLURM_NODEID={node} is beyond the {len(counts)} nodes of SLURM_TASKS_PER_NODE="
            f"{layout!r}; clear stale SLURM variables and start the job with srun"
        )
    return counts[node]


def _from_mpi(env: Mapping[str, str], names: Sequence[str]) -> RankEnvironment:
    numbers = _numbers(env, names, "mpirun")
    _, world_size, _, local_world_size = numbers
    if "MASTER_ADDR" in env or local_world_size == world_size:
        # Ranks of one mpirun share a parent if the launcher sets no job name.
        job = env.get("PMIX_NAMESPACE") or str(os.getppid())
        address, port = env.get("MASTER_ADDR", "127.0.0.1"), _port(env, job)
    else:
        address, port = _broadcast_master(world_size)
    return RankEnvironment("mpirun", *numbers, address, port)


def _broadcast_master(world_size: int) -> tuple[str, int]:
    """Broadcast rank 0's host and a free port over MPI, as bytes instead of pickled objects."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TopologyError(
            f"mpirun over several nodes without MASTER_ADDR, and mpi4py cannot be imported "
            f"({error}); "
            "pass -x MASTER_ADDR=<host of rank 0> (Open MPI) or -genv MASTER_ADDR (Hydra)"
        ) from None
    comm = MPI.COMM_WORLD
    if comm.Get_size() != world_size:
        raise TopologyError(
            f"mpi4py sees {comm.Get_size()} ranks, but mpirun started {world_size}: mpi4py was "
            "built for another MPI; set MASTER_ADDR, or install mpi4py for this mpirun"
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

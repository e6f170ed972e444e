"""Process groups of the rank grid: tensor parallel by data parallel.

``rank = dp_rank * tp_size + tp_rank``, so that tensor-parallel ranks are neighbours in one node.
Groups are passed as arguments; there is no global state.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup
from torch.distributed.rendezvous import rendezvous

from megatron_deberta.config.rules import check_tensor_parallel_divides
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.environment import RankEnvironment
from megatron_deberta.errors import ConfigError, RendezvousError, TopologyError
from megatron_deberta.processes import call_in_thread

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class ProcessGroups:
    """Ranks, sizes and groups of this process.

    A group of one rank is None. In a single process both are, and ``torch.distributed`` is not
    initialised.

    Attributes:
        rank: global rank, ``dp_rank * tp_size + tp_rank``.
        tp_rank: tensor-parallel rank.
        dp_rank: data-parallel rank.
        tp_group: ranks that split the layers: those with this rank's ``dp_rank``.
        dp_group: ranks that split the batch: those with this rank's ``tp_rank``.
        own_group: this rank alone, for libraries that need a group; None where neither of the
            other two is None, and in a single process.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    tp_group: ProcessGroup | None
    dp_group: ProcessGroup | None
    device: torch.device
    own_group: ProcessGroup | None = None


def choose_device(config: RunConfig) -> torch.device:
    """Resolve ``train.device`` on this machine.

    Raises:
        ConfigError: ``train.device=cuda`` and CUDA is not available.
    """
    available = torch.cuda.is_available()
    if config.train.device == "cuda" and not available:
        raise ConfigError("train.device=cuda but CUDA is not available here; use auto or cpu")
    return torch.device("cuda" if available and config.train.device != "cpu" else "cpu")


def flush_denormal_numbers() -> None:
    """Let this process's CPU arithmetic take numbers below 1.2e-38 (fp32, bf16) as zero.

    Attention of a trained model is full of such probabilities, with which a CPU computes up to
    thirty times slower. Call it before torch starts its threads, which inherit the setting.
    """
    for dtype in (np.float32, np.float64):
        np.finfo(dtype)  # NumPy before 2.4 warns of the setting unless these are cached.
    torch.set_flush_denormal(True)


def single_process_groups(device: torch.device) -> ProcessGroups:
    """Groups of a single process without ``torch.distributed``."""
    return ProcessGroups(0, 1, 0, 1, 0, 1, None, None, device)


def init_process_groups(
    tensor_parallel_size: int,
    device: torch.device,
    timeout_minutes: float,
    environment: RankEnvironment,
    is_stopped: Callable[[], bool] = lambda: False,
) -> ProcessGroups:
    """Initialise ``torch.distributed`` (NCCL on CUDA, gloo elsewhere) and create the groups.

    Collective over all ranks; a single process initialises nothing. Ends with a collective over
    every group, so that an unreachable rank is detected here and not in the first step.

    Args:
        tensor_parallel_size: number of ranks that split the layers.
        device: ``cuda`` without an index selects the local rank's GPU.
        timeout_minutes: of each collective.
        environment: rank and address, see ``environment.read_environment``.
        is_stopped: whether this process should no longer wait for the other ranks.

    Raises:
        InterruptedError: ``is_stopped`` while it waited.
        RendezvousError: another program listens on the port, or ranks cannot be reached.
        TopologyError: ``tensor_parallel_size`` does not divide the world size or spans nodes, or
            there is no GPU for this rank.
    """
    check_layout(tensor_parallel_size, environment)
    device = _local_device(device, environment.local_rank)
    if environment.world_size == 1:
        return single_process_groups(device)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    store = _meet(environment, timeout, is_stopped)
    store.set_timeout(timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("default_pg", store),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        return build_grid(tensor_parallel_size, device, timeout)
    except BaseException:
        shutdown()
        raise


def _meet(
    environment: RankEnvironment, timeout: datetime.timedelta, is_stopped: Callable[[], bool]
) -> Store:
    """Connect to the other ranks.

    In a thread: torch waits outside Python, where no signal handler runs.
    """
    address, port = environment.master_address, environment.master_port
    host = f"[{address}]" if ":" in address else address
    place = f"rank {environment.rank}, {host}:{port}"
    # torchrun serves the ranks itself.
    if environment.rank == 0 and not os.environ.get("TORCHELASTIC_USE_AGENT_STORE"):
        _check_port(port)

    def connect() -> Store:
        url = f"tcp://{host}:{port}"
        ranks = rendezvous(url, environment.rank, environment.world_size, timeout=timeout)
        store: Store = next(ranks)[0]
        return store

    future = call_in_thread(connect, "rendezvous")
    while not future.done():
        wait([future], _POLL_SECONDS)
        if is_stopped() and (not future.done() or future.exception() is not None):
            raise InterruptedError(f"{place}: stopped while waiting for the other ranks")
    try:
        return future.result()
    except Exception as error:
        reason = " ".join(str(error).split()).partition(" Exception raised from ")[0]
        raise RendezvousError(
            f"{place}: cannot connect to the other ranks: {reason}; check MASTER_ADDR and "
            "MASTER_PORT, and that every rank has started"
        ) from error


def _check_port(port: int) -> None:
    """Check that rank 0 can listen; torch would log a page.

    Raises:
        RendezvousError: another program listens there.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except (OSError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number else error
        raise RendezvousError(
            f"MASTER_PORT={port} on {socket.gethostname()}: {reason}; set MASTER_PORT to a free "
            "port on every rank"
        ) from error


def build_grid(
    tensor_parallel_size: int, device: torch.device, timeout: datetime.timedelta
) -> ProcessGroups:
    """Create the groups in an initialised ``torch.distributed`` and connect each of them.

    Collective over all ranks, which create every group in the same order.

    Args:
        tensor_parallel_size: must divide the world size.
        device: where this rank computes.
        timeout: of each collective.
    """
    rank, world_size, tp_size = dist.get_rank(), dist.get_world_size(), tensor_parallel_size
    tp_lists = [list(range(first, first + tp_size)) for first in range(0, world_size, tp_size)]
    dp_lists = [list(range(first, world_size, tp_size)) for first in range(tp_size)]
    tp_group, dp_group = (
        dist.new_subgroups_by_enumeration(lists, timeout=timeout)[0] if len(lists[0]) > 1 else None
        for lists in (tp_lists, dp_lists)
    )
    for group in (tp_group, dp_group):
        if group is not None:
            # gloo and NCCL connect at first use.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    own_group = None
    if tp_group is None or dp_group is None:
        # Without the other ranks, so there is no barrier.
        own_group = dist.new_group([rank], timeout=timeout, use_local_synchronization=True)
    return ProcessGroups(
        rank=rank,
        world_size=world_size,
        tp_rank=rank % tp_size,
        tp_size=tp_size,
        dp_rank=rank // tp_size,
        dp_size=world_size // tp_size,
        tp_group=tp_group,
        dp_group=dp_group,
        device=device,
        own_group=own_group,
    )


def host_group(groups: ProcessGroups, timeout_minutes: float) -> ProcessGroup | None:
    """Create a gloo group of all ranks for data in host memory. Collective over all ranks.

    Args:
        groups: process groups.
        timeout_minutes: of each exchange.

    Returns:
        The group; None in a single process.
    """
    group: ProcessGroup | None = None
    if groups.world_size > 1:
        timeout = datetime.timedelta(minutes=timeout_minutes)
        group = dist.new_group(backend="gloo", timeout=timeout)
    return group


def shutdown() -> None:
    """Destroy all process groups, if any.

    Call it on every way out of a run: a process that exits with live groups can abort.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def check_layout(tensor_parallel_size: int, environment: RankEnvironment) -> None:
    """Check that tensor-parallel groups lie within nodes.

    Raises:
        TopologyError: the size does not divide the world size or the ranks per node, or the ranks
            of a node are not consecutive.
    """
    check_tensor_parallel_divides(
        tensor_parallel_size,
        {
            "world_size": environment.world_size,
            "local_world_size (ranks per node)": environment.local_world_size,
        },
        error=TopologyError,
    )
    if (environment.rank - environment.local_rank) % tensor_parallel_size:
        raise TopologyError(
            f"parallel.tensor_parallel_size={tensor_parallel_size} needs consecutive ranks on a "
            f"node, but rank {environment.rank} is number {environment.local_rank} of its node; "
            "start with srun --distribution=block or mpirun --map-by slot"
        )


def _local_device(device: torch.device, local_rank: int) -> torch.device:
    if device.type != "cuda":
        return device
    available = torch.cuda.device_count()
    index: int | None = device.index
    if index is None:
        # srun --gpus-per-task shows each rank only its own GPU, always as number 0.
        index = local_rank if available > 1 else 0
    if index >= available:
        raise TopologyError(
            f"train.device={device.type} needs GPU {index} for local rank {local_rank}, but "
            f"{available} are visible; start at most {available} ranks per node, or use "
            "train.device=cpu"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device

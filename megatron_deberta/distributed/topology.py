"""The rank grid: which processes share a layer and which share a batch.

Owns the process groups and their end of life. Refuses global state: groups travel as arguments.
Tensor parallelism is the fast axis, ``rank = dp_rank * tp_size + tp_rank``, so that the ranks of a
layer are neighbours inside one node.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_deberta.config.divisibility import check_tensor_parallel_divides
from megatron_deberta.distributed.environment import RankEnvironment
from megatron_deberta.errors import TopologyError


@dataclass(frozen=True)
class ProcessGroups:
    """This process's place in the grid.

    The groups are None where ``torch.distributed`` is not started (one process).
    """

    rank: int
    """Global rank, ``dp_rank * tp_size + tp_rank``."""
    world_size: int
    """All ranks, ``dp_size * tp_size``."""
    tp_rank: int
    """Place among the ranks that split a layer."""
    tp_size: int
    """Ranks that split a layer."""
    dp_rank: int
    """Place among the ranks that split a batch."""
    dp_size: int
    """Ranks that split a batch."""
    tp_group: ProcessGroup | None
    """The ranks with this rank's ``dp_rank``."""
    dp_group: ProcessGroup | None
    """The ranks with this rank's ``tp_rank``."""
    device: torch.device
    """Where this rank computes."""


def single_process_groups(device: torch.device) -> ProcessGroups:
    """The grid of one process that started no ``torch.distributed``."""
    return ProcessGroups(0, 1, 0, 1, 0, 1, None, None, device)


def init_process_groups(
    tensor_parallel_size: int,
    device: torch.device,
    timeout_minutes: float,
    environment: RankEnvironment,
) -> ProcessGroups:
    """Start ``torch.distributed`` and build the grid; NCCL on CUDA, gloo elsewhere.

    Collective over all ranks. One process alone starts nothing. Ends with a collective over every
    group, so that a rank that cannot be reached is noticed here and not in the first step.

    Args:
        tensor_parallel_size: ranks a layer is split over.
        device: where to compute; ``cuda`` without an index takes the local rank's.
        timeout_minutes: how long a collective may wait.
        environment: ranks and meeting point, see ``environment.read_environment``.

    Returns:
        The grid.

    Raises:
        TopologyError: ``tensor_parallel_size`` does not divide the world or spans nodes, or there
            is no GPU for this rank.
    """
    check_layout(tensor_parallel_size, environment)
    device = _local_device(device, environment.local_rank)
    if environment.world_size == 1:
        return single_process_groups(device)
    address = environment.master_address
    host = f"[{address}]" if ":" in address else address
    timeout = datetime.timedelta(minutes=timeout_minutes)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{host}:{environment.master_port}",
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


def build_grid(
    tensor_parallel_size: int, device: torch.device, timeout: datetime.timedelta
) -> ProcessGroups:
    """Build the groups of a started ``torch.distributed`` and talk over each once.

    Collective over all ranks: every rank creates every group, in the same order.

    Args:
        tensor_parallel_size: ranks a layer is split over; must divide the world.
        device: where this rank computes.
        timeout: how long a collective may wait.

    Returns:
        The grid; over the whole world, the groups are groups of their own.
    """
    rank, world_size, tp_size = dist.get_rank(), dist.get_world_size(), tensor_parallel_size
    tp_lists = [list(range(first, first + tp_size)) for first in range(0, world_size, tp_size)]
    dp_lists = [list(range(first, world_size, tp_size)) for first in range(tp_size)]
    own: list[ProcessGroup] = []
    for ranks in (*tp_lists, *dp_lists):
        group = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            own.append(group)
    tp_group, dp_group = own
    for group in own:
        # gloo and NCCL connect at first use; do it while every rank is at the same place.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
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
    )


def shutdown() -> None:
    """Destroy every process group; harmless where none was started.

    To be called on every way out of a run: a process that exits with live groups can abort.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def check_layout(tensor_parallel_size: int, environment: RankEnvironment) -> None:
    """Refuse a tensor-parallel size that the ranks cannot carry.

    Raises:
        TopologyError: the size is below 1, does not divide the world, or does not divide the ranks
            of a node, or the ranks of a node are not consecutive (either way a layer would be
            split across the network).
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
    chosen: int | None = device.index
    # srun --gpus-per-task shows each rank only its own GPU, always as number 0.
    index = chosen if chosen is not None else local_rank if available > 1 else 0
    if index >= available:
        raise TopologyError(
            f"train.device={device.type} needs GPU {index} for local rank {local_rank}, but this "
            f"node shows {available}; start at most {available} ranks a node, or train.device=cpu"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device

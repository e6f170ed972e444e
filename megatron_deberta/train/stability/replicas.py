"""Bitwise comparison of replicated weights across ranks.

Differences are not repaired: of two copies the correct one is unknown, and values that a faulty
rank has already sent to others would remain.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.distributed.control import all_reduce_max, gather_rows
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Placements
from megatron_deberta.errors import ReplicaError

_CHUNK_ELEMENTS = 1 << 20
# 2**64 over the golden ratio, odd, as a signed number
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
# A second odd number, so that no two positions have the same factor by construction
_ODD_OF_CHUNKS = 0xC2B2AE3D27D4EB4F - (1 << 64)
_NAME_BYTES = 64
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
"""Integers of the same size as a number of so many bytes."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A tensor that other ranks hold as well.

    Attributes:
        name: canonical parameter name.
        tensor: this rank's copy.
        over_dp: replicated over data-parallel ranks.
        over_tp: replicated over tensor-parallel ranks.
    """

    name: str
    tensor: Tensor
    over_dp: bool
    over_tp: bool


def checksum(tensor: Tensor) -> Tensor:
    """Compute a 64-bit checksum of a tensor's bits on its device, without host synchronization.

    The sum modulo 2**64 of all elements' bits as integers, each times an odd number that depends
    on its position. A change of one element is always detected, a change of several with
    probability 1 - 2**-64.

    Args:
        tensor: any shape; 2 or 4 bytes per element.

    Returns:
        int64 scalar.
    """
    bits = tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])
    places = torch.arange(min(len(bits), _CHUNK_ELEMENTS), device=bits.device) * _ODD | 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK_ELEMENTS):
        total = total * _ODD_OF_CHUNKS + (chunk.to(torch.int64) * places[: len(chunk)]).sum()
    return total


def replicas(module: nn.Module, specs: Placements) -> Iterator[Replica]:
    """Yield this rank's weights that other ranks hold as well.

    Under ZeRO-3 the data-parallel ranks hold different parts, so only parameters that are not
    split are replicated, over tensor-parallel ranks.
    """
    for name, parameter in module.named_parameters():
        over_tp = specs[name].dim is None
        part = getattr(parameter, "ds_tensor", None)
        if part is None:
            yield Replica(name, parameter, over_dp=True, over_tp=over_tp)
        elif over_tp:
            yield Replica(name, part, over_dp=False, over_tp=True)


def check_replicas(module: nn.Module, specs: Placements, groups: ProcessGroups, step: int) -> None:
    """Compare all replicas. Collective over all ranks; one host synchronization.

    Args:
        module: the model.
        specs: placement of every parameter.
        groups: the rank grid.
        step: completed optimizer steps, for the message.

    Raises:
        ReplicaError: on all ranks: replicas differ; names parameter, ranks and hosts.
    """
    if groups.world_size == 1:
        return
    found = list(replicas(module, specs))
    sums = torch.stack([checksum(replica.tensor) for replica in found]).to(groups.device)
    differs = torch.zeros((), dtype=torch.int64, device=groups.device)
    for group, shared in (
        (groups.tp_group, [replica.over_tp for replica in found]),
        (groups.dp_group, [replica.over_dp for replica in found]),
    ):
        if group is not None:
            compared = sums * torch.tensor(shared, device=groups.device)
            # Maxima of x and ~x give the range; -x would overflow for the smallest integer.
            bounds = torch.stack([compared, ~compared])
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
            differs += (bounds[0] != ~bounds[1]).any()
    if not all_reduce_max(differs, groups).item():
        return
    table = gather_rows(sums, groups)
    hosts = gather_hosts(groups)
    differing = find_differing_ranks(table.tolist(), found, groups.tp_size)
    raise ReplicaError(_describe(differing, hosts, step), differing)


def make_equal(
    module: nn.Module,
    specs: Placements,
    groups: ProcessGroups,
    differing: Mapping[str, tuple[int, ...]],
) -> None:
    """Overwrite differing replicas by one of them, so that ranks can be compared. Collective.

    The copies are those of the majority, if there is one; the result is not to be trained on.

    Args:
        module: the model.
        specs: placement of every parameter.
        groups: the rank grid.
        differing: of ``ReplicaError``.
    """
    tp_first, size = groups.dp_rank * groups.tp_size, groups.tp_size
    tp_ranks = range(tp_first, tp_first + size)
    dp_ranks = range(groups.tp_rank, groups.world_size, size)
    for replica in replicas(module, specs):
        for group, ranks, shared in (
            (groups.tp_group, tp_ranks, replica.over_tp),
            (groups.dp_group, dp_ranks, replica.over_dp),
        ):
            if group is not None and shared and replica.name in differing:
                wrong = differing[replica.name]
                source = next((rank for rank in ranks if rank not in wrong), ranks[0])
                dist.broadcast(replica.tensor.data, source, group=group)


def find_differing_ranks(
    sums: list[list[int]], found: list[Replica], tp_size: int
) -> dict[str, tuple[int, ...]]:
    """Find the ranks whose replica differs from the majority.

    Args:
        sums: checksums, indexed by rank and replica.
        found: the replicas.
        tp_size: tensor-parallel size; these ranks are consecutive.

    Returns:
        Parameter name to ranks; all holders if no value has a majority.
    """
    differing = {}
    for column, replica in enumerate(found):
        holders: dict[tuple[int, int], list[int]] = {}
        for rank in range(len(sums)):
            dp_rank, tp_rank = divmod(rank, tp_size)
            key = (0 if replica.over_dp else dp_rank, 0 if replica.over_tp else tp_rank)
            holders.setdefault(key, []).append(rank)
        wrong: list[int] = []
        for ranks in holders.values():
            ((value, count),) = Counter(sums[rank][column] for rank in ranks).most_common(1)
            if 2 * count > len(ranks):
                wrong += [rank for rank in ranks if sums[rank][column] != value]
            else:
                wrong += ranks
        if wrong:
            differing[replica.name] = tuple(sorted(wrong))
    return differing


def _describe(differing: Mapping[str, tuple[int, ...]], hosts: list[str], step: int) -> str:
    name, ranks = next(iter(differing.items()))
    where = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks)
    more = f" and {len(differing) - 1} more parameters" if len(differing) > 1 else ""
    one_of = "one of " if len(ranks) > 1 else ""
    return (
        f"step {step}: {name}{more} differs from the other ranks' on {one_of}{where}; its memory "
        "or arithmetic is faulty: exclude that node and resume from the last checkpoint"
    )


def gather_hosts(groups: ProcessGroups) -> list[str]:
    """Return the host of each rank, as SLURM names it. Collective over all ranks."""
    return gather_names(os.environ.get("SLURMD_NODENAME") or socket.gethostname(), groups)


def gather_names(name: str, groups: ProcessGroups) -> list[str]:
    """Return a name that each rank has, cut to 64 bytes. Collective over all ranks."""
    content = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    row = torch.tensor(list(content), dtype=torch.uint8, device=groups.device)
    rows = gather_rows(row, groups).tolist()
    return [bytes(found).rstrip(b"\0").decode(errors="replace") for found in rows]

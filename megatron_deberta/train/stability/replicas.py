"""Whether weights that several ranks hold are still the same bits on all of them.

Owns the checksums, their comparison and naming who differs. Refuses to repair: which copy is right
is not known where there are two, and what a faulty rank has sent to others is not undone by it.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.distributed.control import all_reduce_max
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.protocol import Placements
from megatron_deberta.errors import ReplicaError

_CHUNK_ELEMENTS = 1 << 20
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 over the golden ratio, odd, as a signed number."""
_ODD_OF_CHUNKS = 0xC2B2AE3D27D4EB4F - (1 << 64)
"""Another one, so that no two places have the same factor by construction."""
_HOST_BYTES = 64
_INTEGERS = {4: torch.int32, 2: torch.int16}


@dataclass(frozen=True, slots=True)
class Replica:
    """A tensor of which other ranks have a copy."""

    name: str
    """Canonical name of its parameter."""
    tensor: Tensor
    """This rank's copy."""
    over_batch: bool
    """All data-parallel ranks hold it."""
    over_layer: bool
    """All tensor-parallel ranks hold it."""


def checksum(tensor: Tensor) -> Tensor:
    """A 64-bit checksum of a tensor's bits, on its device, without the host waiting.

    The sum of all elements' bits as integers, each times an odd number of its place, modulo 2**64.
    So a change of one element always shows, and one of several is missed once in 2**64 times.

    Args:
        tensor: any shape, of 2 or 4 bytes an element.

    Returns:
        int64 scalar.
    """
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    places = torch.arange(min(len(bits), _CHUNK_ELEMENTS), device=bits.device) * _ODD | 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK_ELEMENTS):
        total = total * _ODD_OF_CHUNKS + (chunk.to(torch.int64) * places[: len(chunk)]).sum()
    return total


def replicas(module: nn.Module, specs: Placements) -> Iterator[Replica]:
    """This rank's weights of which there are copies elsewhere.

    Under ZeRO-3 data-parallel ranks hold different parts, so only tensor-parallel ranks have copies
    of each other's, of parameters that are not split.
    """
    for name, parameter in module.named_parameters():
        over_layer = specs[name].dim is None
        part = getattr(parameter, "ds_tensor", None)
        if part is None:
            yield Replica(name, parameter, over_batch=True, over_layer=over_layer)
        elif over_layer:
            yield Replica(name, part, over_batch=False, over_layer=True)


def check_replicas(module: nn.Module, specs: Placements, groups: ProcessGroups, step: int) -> None:
    """Compare all copies. Collective over all ranks; the host waits once.

    Args:
        module: the model.
        specs: placement of every parameter.
        groups: the rank grid.
        step: optimizer steps done, for the message.

    Raises:
        ReplicaError: copies differ; the parameter, rank and host are named, on all ranks.
    """
    if groups.world_size == 1:
        return
    found = list(replicas(module, specs))
    sums = torch.stack([checksum(replica.tensor) for replica in found]).to(groups.device)
    differs = torch.zeros((), dtype=torch.int64, device=groups.device)
    for group, shared in (
        (groups.tp_group, [replica.over_layer for replica in found]),
        (groups.dp_group, [replica.over_batch for replica in found]),
    ):
        if group is not None:
            compared = sums * torch.tensor(shared, device=groups.device)
            # The largest of x and of not x: the range, without a number that cannot be negated.
            ends = torch.stack([compared, ~compared])
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
            differs += (ends[0] != ~ends[1]).any()
    if not all_reduce_max(differs, groups).item():
        return
    table = _gather(sums, groups)
    hosts = [bytes(row).rstrip(b"\0").decode() for row in _gather(_host(groups), groups).tolist()]
    culprits = find_differing_ranks(table.tolist(), found, groups.tp_size)
    raise ReplicaError(_describe(culprits, hosts, step))


def find_differing_ranks(
    sums: list[list[int]], found: list[Replica], tp_size: int
) -> dict[str, tuple[int, ...]]:
    """Which ranks differ from most of those that hold the same.

    Args:
        sums: checksums by rank and replica.
        found: what each column is.
        tp_size: tensor-parallel ranks, which are neighbours.

    Returns:
        Parameter to ranks; all holders where no value is that of more than half of them.
    """
    culprits = {}
    for column, replica in enumerate(found):
        holders: dict[tuple[int, int], list[int]] = {}
        for rank in range(len(sums)):
            row, place = divmod(rank, tp_size)
            same = (0 if replica.over_batch else row, 0 if replica.over_layer else place)
            holders.setdefault(same, []).append(rank)
        wrong: list[int] = []
        for ranks in holders.values():
            ((value, count),) = Counter(sums[rank][column] for rank in ranks).most_common(1)
            if 2 * count > len(ranks):
                wrong += [rank for rank in ranks if sums[rank][column] != value]
            else:
                wrong += ranks
        if wrong:
            culprits[replica.name] = tuple(sorted(wrong))
    return culprits


def _describe(culprits: Mapping[str, tuple[int, ...]], hosts: list[str], step: int) -> str:
    name, ranks = next(iter(culprits.items()))
    where = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks)
    more = f" and {len(culprits) - 1} more parameters" if len(culprits) > 1 else ""
    of_two = "one of " if len(ranks) > 1 else ""
    return (
        f"step {step}: {name}{more} is not what other ranks have on {of_two}{where}; its memory or "
        "arithmetic is at fault: leave that node out and start again from the last checkpoint"
    )


def _gather(row: Tensor, groups: ProcessGroups) -> Tensor:
    """Rows of all ranks, in order."""
    rows = row.unsqueeze(0)
    for group, size in ((groups.tp_group, groups.tp_size), (groups.dp_group, groups.dp_size)):
        if group is not None:
            parts = [torch.empty_like(rows) for _ in range(size)]
            dist.all_gather(parts, rows, group=group)
            rows = torch.cat(parts)
    return rows


def _host(groups: ProcessGroups) -> Tensor:
    name = socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0")
    return torch.tensor(list(name), dtype=torch.uint8, device=groups.device)

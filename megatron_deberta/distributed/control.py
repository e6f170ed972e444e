"""Control-plane collectives: failures, flags and rank 0's decisions, over all ranks.

Only integers are exchanged; torch's object collectives use pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import EXIT_FAILURE, MegatronDebertaError


def all_reduce_max(numbers: Tensor, groups: ProcessGroups) -> Tensor:
    """Compute the elementwise maximum over all ranks, in place. Collective: all ranks; a barrier.

    Args:
        numbers: any shape and dtype except bool, on ``groups.device``.
        groups: process groups.
    """
    # The two groups together cover all ranks.
    for group in (groups.tp_group, groups.dp_group):
        if group is not None:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return numbers


def sum_over_batch_ranks(numbers: Tensor, groups: ProcessGroups) -> Tensor:
    """Sum a tensor over data-parallel ranks, in place. Collective over these ranks.

    Args:
        numbers: any shape, on ``groups.device``.
        groups: process groups.
    """
    if groups.dp_group is not None:
        dist.all_reduce(numbers, group=groups.dp_group)
    return numbers


def all_reduce_any(flag: bool, groups: ProcessGroups) -> bool:
    """Return whether the flag is set on any rank. Collective over all ranks; also a barrier."""
    return bool(_max(int(flag), groups))


def broadcast_from_rank_zero(value: int, groups: ProcessGroups) -> int:
    """Return rank 0's value on every rank. Collective over all ranks."""
    return _max(value if groups.rank == 0 else torch.iinfo(torch.int64).min, groups)


def broadcast_text(text: str, groups: ProcessGroups) -> str:
    """Return rank 0's text on every rank. Collective over all ranks."""
    content = text.encode() if groups.rank == 0 else b""
    size = broadcast_from_rank_zero(len(content), groups)
    numbers = torch.zeros(size, dtype=torch.int32, device=groups.device)
    if groups.rank == 0:
        numbers += torch.tensor(list(content), dtype=torch.int32, device=groups.device)
    return bytes(all_reduce_max(numbers, groups).tolist()).decode()


def gather_bytes(content: bytes, group: ProcessGroup | None) -> list[bytes]:
    """Return every rank's bytes, by rank. Collective over the group.

    Args:
        content: of this rank.
        group: group whose tensors are in host memory; None in a single process.
    """
    if group is None:
        return [content]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(content)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
    rows = [torch.empty_like(padded) for _ in sizes]
    if longest:
        dist.all_gather(rows, padded, group=group)
    return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def gather_rows(row: Tensor, groups: ProcessGroups) -> Tensor:
    """Gather one tensor per rank, stacked by rank. Collective: all ranks.

    Args:
        row: any shape and dtype, both equal on all ranks, on ``groups.device``.
        groups: process groups.

    Returns:
        ``[world_size, *row.shape]``, equal on all ranks.
    """
    rows = row.unsqueeze(0)
    for group, size in ((groups.tp_group, groups.tp_size), (groups.dp_group, groups.dp_size)):
        if group is not None:
            parts = [torch.empty_like(rows) for _ in range(size)]
            dist.all_gather(parts, rows, group=group)
            rows = torch.cat(parts)
    return rows


@contextmanager
def raise_on_all_ranks(groups: ProcessGroups) -> Iterator[None]:
    """Run a block without collectives; if it fails on one rank, raise on all ranks.

    Without it, the other ranks would wait in their next collective until it times out. Collective
    over all ranks, at the end of the block.

    Raises:
        MegatronDebertaError: another rank failed; with its exit code.
        Exception: what the block raised on this rank.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    own_code = 0 if problem is None else getattr(problem, "exit_code", EXIT_FAILURE)
    code = _max(own_code, groups)
    if problem is None and code:
        problem = MegatronDebertaError("another rank failed; see its message")
        problem.exit_code = code
    if problem is not None:
        raise problem


def _max(value: int, groups: ProcessGroups) -> int:
    number = torch.tensor(value, dtype=torch.int64, device=groups.device)
    return int(all_reduce_max(number, groups).item())

"""What all ranks must know alike: a failure anywhere, a signal to one of them, rank 0's decision.

Owns collectives over the whole grid on single numbers. Refuses objects: torch's object collectives
are pickles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import MegatronDebertaError

_NOTHING = torch.iinfo(torch.int64).min


def all_reduce_max(numbers: Tensor, groups: ProcessGroups) -> Tensor:
    """Elementwise maximum over all ranks, in place. Collective over all ranks; also a barrier.

    Args:
        numbers: any shape and dtype but bool, on the ranks' device.
        groups: the rank grid.
    """
    # Over the layer's ranks, then over the batch's: that covers the grid, so no group of all ranks
    # is needed.
    for group in (groups.tp_group, groups.dp_group):
        if group is not None:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return numbers


def all_reduce_any(flag: bool, groups: ProcessGroups) -> bool:
    """Whether the flag is set on any rank; the same on every rank. Collective; also a barrier."""
    return bool(_largest(int(flag), groups))


def broadcast_from_rank_zero(value: int, groups: ProcessGroups) -> int:
    """Rank 0's value, on every rank. Collective."""
    return _largest(value if groups.rank == 0 else _NOTHING, groups)


@contextmanager
def raise_on_all_ranks(groups: ProcessGroups) -> Iterator[None]:
    """Do something without collectives; where it fails on one rank, it fails on all of them.

    For what ranks do differently, as reading a file on rank 0 alone: the others would wait in their
    next collective until it times out. Collective over all ranks, at the end.

    Raises:
        MegatronDebertaError: another rank failed; its own error tells why.
        Exception: what the block raised on this rank.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    if all_reduce_any(problem is not None, groups):
        raise problem or MegatronDebertaError("another rank failed; see its message")


def _largest(value: int, groups: ProcessGroups) -> int:
    number = torch.tensor(value, dtype=torch.int64, device=groups.device)
    return int(all_reduce_max(number, groups).item())

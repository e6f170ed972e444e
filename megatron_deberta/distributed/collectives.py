"""Differentiable collectives over an explicit process group.

Owns every communication inside forward and backward, and the pairing of each forward collective
with the one its gradient needs. Refuses to know a model: tensors are ``[B, N, C]`` (batch, tokens,
channels; trailing dimensions are free where only the sequence is touched) and nothing else.

Every function is **collective** over ``group``: all of its ranks call it, in the same order, in
forward and again in backward. A ``group`` of None or of one rank makes it the identity.

======================  =========================  ==============================
function                forward                    backward
======================  =========================  ==============================
copy_to_tensor_parallel_region                 identity                   all-reduce
reduce_from_tensor_parallel_region             all-reduce                 identity
gather_sequence         all-gather, tokens         reduce-scatter, tokens
reduce_scatter_sequence reduce-scatter, tokens     all-gather, tokens
scatter_sequence        own slice of tokens        all-gather, tokens
gather_from_sequence_parallel_region          all-gather, tokens         own slice of tokens
gather_channels         all-gather, channels       own slice of channels
channels_to_sequence    all-to-all                 all-to-all, the other way
======================  =========================  ==============================

Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (the pairs f/f-bar and g/g-bar).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_deberta.errors import TopologyError

_SEQUENCE_DIM = 1

# torch 2.13 renamed these two and warns about the old names; older releases know only those.
_all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

_Exchange = Callable[[Tensor, ProcessGroup], Tensor]


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks in ``group``; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """This process's place in ``group``; 0 for None."""
    return 0 if group is None else group.rank()


def all_reduce_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum ``x`` over ``group`` into a new contiguous tensor; not differentiable."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Stack every rank's ``x``: ``[...] -> [tp, ...]``; not differentiable."""
    out = x.new_empty((group.size(), *x.shape))
    # Flat, because gloo knows only the concatenated form.
    _all_gather_single(out.view(-1), x.contiguous().view(-1), group=group)
    return out


def copy_to_tensor_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Hand a replicated tensor to computations that differ by rank.

    Also the way to use a replicated parameter where each rank sees only part of the work (its own
    heads or tokens): the parameter's gradient becomes the whole sum on every rank.

    Args:
        x: any shape, equal on all ranks.
        group: ranks that share ``x``.

    Returns:
        ``x``; its gradient is summed over the group.
    """
    return _exchange(x, group, _identity, all_reduce_sum)


def reduce_from_tensor_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum each rank's part into a replicated tensor.

    Args:
        x: any shape, one summand a rank.
        group: ranks to sum over.

    Returns:
        The sum, equal on all ranks; its gradient, already whole, passes through.
    """
    return _exchange(x, group, all_reduce_sum, _identity)


def gather_sequence(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather token shards before computations that differ by rank (column-parallel layers).

    Args:
        x: ``[B, N/tp, ...]``, this rank's tokens.
        group: ranks the sequence is split over.

    Returns:
        ``[B, N, ...]``; its gradient is summed over ranks and split.
    """
    return _exchange(x, group, _all_gather_sequence, _reduce_scatter_sequence)


def reduce_scatter_sequence(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum each rank's part and keep this rank's tokens (row-parallel layers).

    Args:
        x: ``[B, N, ...]``, one summand a rank.
        group: ranks the sequence becomes split over.

    Returns:
        ``[B, N/tp, ...]``; its gradient is gathered.

    Raises:
        TopologyError: N does not divide by the number of ranks.
    """
    return _exchange(x, group, _reduce_scatter_sequence, _all_gather_sequence)


def scatter_sequence(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Keep this rank's tokens of a replicated tensor.

    Args:
        x: ``[B, N, ...]``, equal on all ranks.
        group: ranks the sequence becomes split over.

    Returns:
        ``[B, N/tp, ...]``; its gradient is gathered, so it is whole on every rank.

    Raises:
        TopologyError: N does not divide by the number of ranks.
    """
    return _exchange(x, group, _slice_sequence, _all_gather_sequence)


def gather_from_sequence_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather token shards for computations that every rank repeats.

    Args:
        x: ``[B, N/tp, ...]``, this rank's tokens.
        group: ranks the sequence is split over.

    Returns:
        ``[B, N, ...]``, replicated; its gradient is whole on every rank already, so each takes its
        slice.
    """
    return _exchange(x, group, _all_gather_sequence, _slice_sequence)


def gather_channels(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather channel shards for computations that every rank repeats.

    Args:
        x: ``[..., C/tp]``, this rank's channels.
        group: ranks the channels are split over.

    Returns:
        ``[..., C]``, replicated; each rank keeps its slice of the gradient.
    """
    return _exchange(x, group, _all_gather_channels, _slice_channels)


def channels_to_sequence(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Turn a split over channels into a split over tokens.

    Args:
        x: ``[B, N, C/tp]``, all tokens of this rank's channels.
        group: ranks both are split over.

    Returns:
        ``[B, N/tp, C]``, all channels of this rank's tokens.

    Raises:
        TopologyError: N does not divide by the number of ranks.
    """
    return _exchange(x, group, _channels_to_sequence, _sequence_to_channels)


def _exchange(
    x: Tensor, group: ProcessGroup | None, forward: _Exchange, backward: _Exchange
) -> Tensor:
    if group is None or group.size() == 1:
        return x
    return cast(Tensor, _Collective.apply(x, group, forward, backward))


class _Collective(torch.autograd.Function):
    """A linear map over ranks, with the map of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, forward: _Exchange, backward: _Exchange
    ) -> Tensor:
        ctx.group, ctx.transpose = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad: Tensor = ctx.transpose(grads[0], ctx.group)
        return grad.contiguous(), None, None, None


def _identity(x: Tensor, group: ProcessGroup) -> Tensor:
    return x


def _check_divides(x: Tensor, parts: int) -> None:
    if x.shape[_SEQUENCE_DIM] % parts:
        raise TopologyError(
            f"a sequence of {x.shape[_SEQUENCE_DIM]} tokens does not split over {parts} ranks; "
            f"make data.sequence_length a multiple of parallel.tensor_parallel_size={parts}"
        )


def _split_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """``[B, N, ...] -> [tp, B, N/tp, ...]``, contiguous, so that a rank's part is one block."""
    parts = group.size()
    _check_divides(x, parts)
    blocks: Tensor = x.unflatten(_SEQUENCE_DIM, (parts, x.shape[_SEQUENCE_DIM] // parts))
    return blocks.movedim(_SEQUENCE_DIM, 0).contiguous()


def _join_sequence(blocks: Tensor) -> Tensor:
    """``[tp, B, N/tp, ...] -> [B, N, ...]``."""
    return blocks.movedim(0, _SEQUENCE_DIM).flatten(_SEQUENCE_DIM, _SEQUENCE_DIM + 1)


def _all_gather_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    return _join_sequence(all_gather(x, group))


def _reduce_scatter_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    blocks = _split_sequence(x, group)
    out = torch.empty_like(blocks[0])
    _reduce_scatter_single(out.view(-1), blocks.view(-1), group=group)
    return out


def _slice_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    _check_divides(x, group.size())
    own = x.chunk(group.size(), dim=_SEQUENCE_DIM)[group.rank()]
    # A copy even where the slice is contiguous: a view would keep the whole sequence alive.
    return own.clone(memory_format=torch.contiguous_format)


def _all_gather_channels(x: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather(x, group).movedim(0, -2).flatten(-2)


def _slice_channels(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim=-1)[group.rank()].contiguous()


def _channels_to_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    sent = _split_sequence(x, group)
    received = torch.empty_like(sent)  # [tp (channel block), B, N/tp, C/tp]
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, -2).flatten(-2)


def _sequence_to_channels(x: Tensor, group: ProcessGroup) -> Tensor:
    sent = x.unflatten(-1, (group.size(), -1)).movedim(-2, 0).contiguous()
    received = torch.empty_like(sent)  # [tp (token block), B, N/tp, C/tp]
    dist.all_to_all_single(received, sent, group=group)
    return _join_sequence(received)

"""Differentiable collectives over a process group.

Tensors are ``[B, N, C]``: batch, tokens, channels. Every function is **collective** over ``group``:
all its ranks call it in the same order, in forward and in backward. A ``group`` of None or of one
rank makes it the identity. Names follow Megatron-LM's ``tensor_parallel/mappings.py``.

Collectives concatenate ranks along the first dimension. Over tokens, which are the second, tensors
of more than one row are therefore copied once more; functions named ``first`` do not.

==========================================  ======================  =======================
function                                    forward                 backward
==========================================  ======================  =======================
copy_to_tensor_parallel_region              identity                all-reduce
reduce_from_tensor_parallel_region          all-reduce              identity
gather_from_tensor_parallel_region          all-gather, channels    local slice of channels
scatter_to_sequence_parallel_region         local slice of tokens   all-gather, tokens
gather_from_sequence_parallel_region        all-gather, tokens      reduce-scatter, tokens
... tensor_parallel_output_grad=False       all-gather, tokens      local slice of tokens
reduce_scatter_to_sequence_parallel_region  reduce-scatter, tokens  all-gather, tokens
all_to_all_hp2sp                            all-to-all              all-to-all, reversed
gather_from_data_parallel_region            all-gather, rows        reduce-scatter, rows
==========================================  ======================  =======================

Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (the pairs f/f-bar and g/g-bar).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_deberta.config.rules import check_tensor_parallel_divides
from megatron_deberta.errors import TopologyError

_SEQUENCE_DIM = 1

TokenOrder = Literal["batch", "sequence", "rank"]
"""Order of gathered tokens in memory: ``[B, N, ...]``, ``[N, B, ...]``, or ``[tp * B, N/tp, ...]``,
which has each rank's tokens after those of the ranks before. Only the first needs a copy of what
was gathered."""

# torch 2.13 renamed these two and warns about the old names.
_all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

_Exchange = Callable[[Tensor, ProcessGroup], Tensor]


def group_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks in ``group``; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """Return this process's rank in ``group``; 0 for None."""
    return 0 if group is None else group.rank()


def all_reduce_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum ``x`` over ``group`` into a new contiguous tensor; not differentiable.

    Args:
        x: any shape, this rank's summand.
        group: the tensor-parallel ranks.
    """
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def start_all_reduce_sum(x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Start to sum a contiguous ``x`` over ``group`` in place; not differentiable.

    Args:
        x: any shape, contiguous; overwritten by the sum.
        group: the tensor-parallel ranks.

    Returns:
        A function that waits and returns ``x``, which must not be read before.
    """
    work = dist.all_reduce(x, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return x

    return wait


def start_reduce_scatter(x: Tensor, group: ProcessGroup, dim: int = 0) -> Callable[[], Tensor]:
    """Start to sum ``x`` over ``group`` and to scatter dimension ``dim``; not differentiable.

    Args:
        x: any shape, this rank's summand.
        group: the tensor-parallel ranks.
        dim: the dimension that is scattered.

    Returns:
        A function that waits and returns this rank's part.

    Raises:
        TopologyError: the dimension is not divisible by the number of ranks.
    """
    blocks = _split(x, group, dim)
    out = torch.empty_like(blocks[0])
    work = _reduce_scatter_single(out.view(-1), blocks.view(-1), group=group, async_op=True)

    def wait(read: Tensor = blocks) -> Tensor:  # Which must live until then.
        work.wait()
        return out

    return wait


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Stack ``x`` of all ranks: ``[...] -> [tp, ...]``; not differentiable."""
    out = x.new_empty((group.size(), *x.shape))
    # Flat, because gloo supports only the concatenated form.
    _all_gather_single(out.view(-1), x.contiguous().view(-1), group=group)
    return out


def all_gather_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather tokens: ``[B, N/tp, ...] -> [B, N, ...]``; not differentiable."""
    return _join_sequence(all_gather(x, group))


def all_gather_first(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather the first dimension: ``[M, ...] -> [tp * M, ...]``; not differentiable."""
    return all_gather(x, group).flatten(0, 1)


def copy_to_tensor_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Pass a replicated tensor to computations that differ by rank.

    A replicated parameter of which each rank uses only a part (its own heads or tokens) passes
    through this function, too, so that its gradient is complete on every rank.

    Args:
        x: any shape, equal on all ranks.
        group: the tensor-parallel ranks.

    Returns:
        ``x``; its gradient is summed over the group.
    """
    return _exchange(x, group, _identity, all_reduce_sum)


def reduce_from_tensor_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum the partial results of all ranks.

    Args:
        x: any shape, this rank's summand.
        group: the tensor-parallel ranks.

    Returns:
        The sum, equal on all ranks; the gradient passes through unchanged.
    """
    return _exchange(x, group, all_reduce_sum, _identity)


def gather_from_tensor_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather channels: ``[..., C/tp] -> [..., C]``, replicated.

    The gradient must be equal on all ranks, each of which keeps its slice.
    """
    return _exchange(x, group, _all_gather_channels, _slice_channels)


def scatter_to_sequence_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Keep this rank's tokens of a replicated tensor: ``[B, N, ...] -> [B, N/tp, ...]``.

    Raises:
        TopologyError: N is not divisible by the number of ranks.
    """
    return _exchange(x, group, _slice_sequence, all_gather_sequence)


def gather_from_data_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather the rows of data-parallel ranks: ``[M, ...] -> [dp * M, ...]``.

    Gradients are summed over the ranks.
    """
    return _exchange(x, group, all_gather_first, _reduce_scatter_first)


def gather_from_sequence_parallel_region(
    x: Tensor, group: ProcessGroup | None, *, tensor_parallel_output_grad: bool = True
) -> Tensor:
    """Gather tokens: ``[B, N/tp, ...] -> [B, N, ...]``, replicated.

    Args:
        x: this rank's tokens.
        group: the tensor-parallel ranks.
        tensor_parallel_output_grad: the following computation differs by rank (column-parallel
            layers), so gradients are summed over ranks; False: it is the same on every rank, and
            each rank keeps its slice of the gradient.
    """
    backward = _reduce_scatter_sequence if tensor_parallel_output_grad else _slice_sequence
    return _exchange(x, group, all_gather_sequence, backward)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum partial results and keep this rank's tokens: ``[B, N, ...] -> [B, N/tp, ...]``.

    Raises:
        TopologyError: N is not divisible by the number of ranks.
    """
    return _exchange(x, group, _reduce_scatter_sequence, all_gather_sequence)


def reduce_scatter_first(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum partial results and keep this rank's rows: ``[tp * M, ...] -> [M, ...]``, differentiably.

    Raises:
        TopologyError: the dimension is not divisible by the number of ranks.
    """
    return _exchange(x, group, _reduce_scatter_first, all_gather_first)


def all_to_all_hp2sp(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Convert hidden (channel) parallel to sequence parallel: ``[B, N, C/tp] -> [B, N/tp, C]``.

    Raises:
        TopologyError: N is not divisible by the number of ranks.
    """
    return _exchange(x, group, _channels_to_sequence, _sequence_to_channels)


def _exchange(
    x: Tensor, group: ProcessGroup | None, forward: _Exchange, backward: _Exchange
) -> Tensor:
    if group is None or group.size() == 1:
        return x
    return cast(Tensor, _Collective.apply(x, group, forward, backward))


class _Collective(torch.autograd.Function):
    """Apply one collective in forward and another in backward."""

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


def _check_divides(x: Tensor, parts: int, dim: int) -> None:
    check_tensor_parallel_divides(parts, {"sequence_length": x.shape[dim]}, error=TopologyError)


def _split(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Return one block of ``dim`` per rank, contiguous; of tokens ``[tp, B, N/tp, ...]``."""
    parts = group.size()
    _check_divides(x, parts, dim)
    blocks: Tensor = x.unflatten(dim, (parts, x.shape[dim] // parts))
    return blocks.movedim(dim, 0).contiguous()


def _join_sequence(blocks: Tensor) -> Tensor:
    """``[tp, B, N/tp, ...] -> [B, N, ...]``."""
    return blocks.movedim(0, _SEQUENCE_DIM).flatten(_SEQUENCE_DIM, _SEQUENCE_DIM + 1)


def _reduce_scatter_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    return start_reduce_scatter(x, group, _SEQUENCE_DIM)()


def _reduce_scatter_first(x: Tensor, group: ProcessGroup) -> Tensor:
    return start_reduce_scatter(x, group)()


def _slice_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    _check_divides(x, group.size(), _SEQUENCE_DIM)
    local = x.chunk(group.size(), dim=_SEQUENCE_DIM)[group.rank()]
    # Always a copy: a view would keep the whole sequence in memory.
    return local.clone(memory_format=torch.contiguous_format)


def _all_gather_channels(x: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather(x, group).movedim(0, -2).flatten(-2)


def _slice_channels(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim=-1)[group.rank()].contiguous()


def _channels_to_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    blocks = _all_to_all(_split(x, group, _SEQUENCE_DIM), group)  # [tp (channels), B, N/tp, C/tp]
    return blocks.movedim(0, -2).flatten(-2)


def _sequence_to_channels(x: Tensor, group: ProcessGroup) -> Tensor:
    blocks = x.unflatten(-1, (group.size(), -1)).movedim(-2, 0).contiguous()
    return _join_sequence(_all_to_all(blocks, group))  # from [tp (tokens), B, N/tp, C/tp]


def _all_to_all(blocks: Tensor, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return received

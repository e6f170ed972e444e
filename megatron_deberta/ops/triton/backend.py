"""Disentangled attention in fused Triton kernels, for Ampere and newer GPUs.

Forward and backward are torch custom operators with fake implementations, so they work under
``torch.compile``, activation recomputation and fake tensors. Masks are converted to ranges of
visible keys first: padding is one run, documents are runs and causality is an upper bound, so a
query sees one run of keys whose ends are non-decreasing from query to query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_deberta.ops.arguments import (
    AttentionArguments,
    MaskCache,
    gathered_ranges,
    visible_ranges,
)
from megatron_deberta.ops.triton import gathered, launch, settings
from megatron_deberta.ops.triton.launch import (
    LOG2_E,
    KernelCall,
    empty_gradients,
    separate,
)


def attend(a: AttentionArguments) -> tuple[Tensor, Tensor | None]:
    """Compute attention in fused kernels.

    Args:
        a: checked arguments, of a dtype and head size that the kernels support.

    Returns:
        Output like ``q``, and if requested the log-sum-exp of the scores, float32
        ``[batch, heads, q_len]``.
    """
    masks: MaskCache = {} if a.masks is None else a.masks
    if "ranges" not in masks:
        masks["ranges"] = _key_and_query_ranges(a)
    ranges = masks["ranges"]
    if a.q_positions is not None and _is_spread(a):
        return _attend_spread(a, a.q_positions.long())
    if a.q_positions is not None:
        ranges = placement(a.q_positions, ranges, a.k.shape[2])
    output, lse2 = _forward_op(
        a.q, a.k, a.v, a.pos_key, a.pos_query, ranges, a.seed, a.q_positions is not None,
        a.positions.max_distance, a.positions.buckets, a.p2c_index == "paper",
        a.dropout_p, a.head_offset, a.scale,
    )  # fmt: skip
    return output, lse2 / LOG2_E if a.return_lse else None


def _is_spread(a: AttentionArguments) -> bool:
    """Return whether gathered queries are computed by the kernels of consecutive queries."""
    queries, length = a.q.shape[2], a.k.shape[2]
    is_half = a.q.dtype != torch.float32
    return a.distinct_positions and is_half and queries >= settings.SPREAD_FRACTION * length > 0


def _attend_spread(a: AttentionArguments, at: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute attention of all positions and return that of the gathered queries.

    Positions without a query have the query 0, whose output is left out, so that its gradient and
    those that it would contribute are exactly 0.

    Args:
        a: arguments of the call.
        at: int64 ``[batch, queries]``, distinct, -1 for padding.
    """
    is_at = at[:, None, :] == torch.arange(a.k.shape[2], device=at.device)[:, None]
    query = is_at.byte().argmax(-1).masked_fill(~is_at.any(-1), -1)
    spread = _Rows.apply(a.q, query, at)
    output, lse = attend(a._replace(q=spread, q_positions=None))
    if lse is not None:
        lse = lse.gather(2, at.clamp(min=0)[:, None].expand(-1, lse.shape[1], -1))
        lse = lse.masked_fill((at < 0)[:, None], float("-inf"))
    return _Rows.apply(output, at, query), lse


class _Rows(torch.autograd.Function):
    """Some rows of ``[batch, heads, rows, head_dim]``, each at most once, or zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        """Gather rows.

        Args:
            ctx: of autograd.
            x: ``[batch, heads, rows, head_dim]``.
            index: int64 ``[batch, n]``, -1: zeros.
            inverse: int64 ``[batch, rows]``, where each row goes, -1: nowhere.
        """
        ctx.save_for_backward(inverse)
        return _rows(x, index)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        """Gather the rows of the gradient: no sum, so no order to keep."""
        (inverse,) = ctx.saved_tensors
        return _rows(d_out, inverse), None, None


def _rows(x: Tensor, index: Tensor) -> Tensor:
    rows = index.clamp(min=0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, rows).masked_fill((index < 0)[:, None, :, None], 0.0)


def _key_and_query_ranges(a: AttentionArguments) -> Tensor | None:
    """Return which keys each query sees, and which queries see each key.

    Returns:
        int32 ``[4, batch, length]``, non-decreasing along a row: first key that a query sees and
        one past the last, first query that sees a key and one past the last. None if nothing is
        hidden.
    """
    ranges = visible_ranges(a)
    if ranges is None:
        return None
    begin, end = ranges
    at = torch.arange(a.k.shape[2], device=a.k.device).expand(begin.shape).contiguous()
    # Key j is seen by the queries from the first with end > j to the last with begin <= j.
    query_begin = torch.searchsorted(end.contiguous(), at, right=True)
    query_end = torch.searchsorted(begin.contiguous(), at, right=True)
    return torch.stack([begin, end, query_begin, query_end]).int()


def placement(q_positions: Tensor, ranges: Tensor | None, length: int) -> Tensor:
    """Return the positions of gathered queries and the keys that they see.

    Args:
        q_positions: ``[batch, queries]``, -1 for padding.
        ranges: those of all positions; None: nothing is hidden.
        length: keys per row.

    Returns:
        int32 ``[3, batch, queries]``: position, first key, one past the last key (0 for padding).
    """
    of_keys = None if ranges is None else ranges[:2].unbind()
    return torch.stack([q_positions.long(), *gathered_ranges(q_positions, of_keys, length)]).int()


_TENSORS = 7
"""Tensors at the beginning of ``_ARGUMENTS``, of which the first five are differentiable."""
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? pos_key, Tensor? pos_query, Tensor? ranges, "
    "Tensor? seed, bool gathered, SymInt max_distance, SymInt buckets, bool paper, "
    "float dropout_p, SymInt head_offset, float scale"
)


def _kernel_call(arguments: tuple[Any, ...]) -> KernelCall:
    q, k, v = map(_last_contiguous, arguments[:3])
    return KernelCall(q, k, v, *arguments[3:])


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op(
    "megatron_deberta::disentangled_attention",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)",
)
def _forward_op(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = _kernel_call(arguments)
    with torch.cuda.device_of(call.q):  # Triton launches on the current device
        return gathered.forward(call) if call.gathered else launch.forward(call)


@_forward_op.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(_last_contiguous(q)), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "megatron_deberta::disentangled_attention_backward",
    mutates_args=(),
    schema=f"(Tensor d_output, Tensor output, Tensor lse2, {_ARGUMENTS}) -> Tensor[]",
)
def _backward_op(d_output: Tensor, output: Tensor, lse2: Tensor, *arguments: Any) -> list[Tensor]:
    call = _kernel_call(arguments)
    with torch.cuda.device_of(call.q):
        backward = gathered.backward if call.gathered else launch.backward
        gradients = backward(call, output, lse2, _last_contiguous(d_output))
    return [x for x in gradients if x is not None]


@_backward_op.register_fake
def _(_0: Tensor, _1: Tensor, _2: Tensor, *arguments: Any) -> list[Tensor]:
    vectors = [_last_contiguous(x) for x in arguments[:3]]
    is_gathered = arguments[_TENSORS]
    like = [torch.empty_like(x) for x in vectors] if is_gathered else empty_gradients(*vectors)
    return like + [x.new_empty(x.shape) for x in arguments[3:5] if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.options = inputs[_TENSORS:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, d_output: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, output, lse2 = ctx.saved_tensors
    results = _backward_op(d_output, output, lse2, *tensors, *ctx.options)
    # An operator's results may not be views of each other.
    count = len(results) - sum(x is not None for x in tensors[3:5])
    gradients = iter([*separate(results[:count]), *results[count:]])
    differentiable = [None if x is None else next(gradients) for x in tensors[:5]]
    return (*differentiable, *(None for _ in (*tensors[5:], *ctx.options)))


_forward_op.register_autograd(_differentiate, setup_context=_setup_context)

"""Disentangled attention in fused Triton kernels, for Ampere and newer GPUs.

Forward and backward are operators of torch with shapes of their own (``register_fake``), so that
``torch.compile``, activation recomputation and fake tensors work with them. Masks become ranges
of visible keys first: padding is one run, documents are runs and causality an upper bound, so a
query always sees one run of keys, whose ends never fall from query to query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_deberta.ops.arguments import AttentionArguments, AttentionRules
from megatron_deberta.ops.relative_positions import RelativePositions
from megatron_deberta.ops.triton import gathered_launch as gathered_launch
from megatron_deberta.ops.triton.launch import LOG2_E, Call, Ranges, backward, forward


def attend(a: AttentionArguments) -> tuple[Tensor, Tensor | None]:
    """Attention in fused kernels.

    Args:
        a: checked arguments, of a dtype and head size the kernels know.

    Returns:
        Output like ``q``, and where asked for the log-sum-exp of the scores, float32
        ``[batch, heads, q_len]``.
    """
    rules = a.rules
    ranges = visible_ranges(rules, a.k)
    if rules.q_positions is not None:
        ranges = gathered_ranges(rules.q_positions, ranges, a.k.shape[2])
    output, lse2 = _forward_op(
        a.q,
        a.k,
        a.v,
        a.pos_key,
        a.pos_query,
        ranges,
        rules.q_positions is not None,
        rules.seed,
        rules.positions.max_distance,
        rules.positions.buckets,
        rules.p2c_index == "paper",
        rules.dropout_p,
        rules.head_offset,
        rules.scale,
    )
    return output, lse2 / LOG2_E if rules.return_lse else None


def visible_ranges(rules: AttentionRules, k: Tensor) -> Tensor | None:
    """Which keys each query sees, and which queries each key is seen by.

    Args:
        rules: of the call.
        k: keys ``[batch, heads, length, head_dim]``.

    Returns:
        int32 ``[4, batch, length]``, as ``launch.Ranges``; None where all see all.
    """
    batch, _, length, _ = k.shape
    if rules.key_padding is None and rules.document_ids is None and not rules.causal:
        return None
    at = torch.arange(length, device=k.device).expand(batch, length)
    low, high = torch.zeros_like(at), torch.full_like(at, length)
    if rules.document_ids is not None:
        ids = rules.document_ids.contiguous()
        low, high = torch.searchsorted(ids, ids), torch.searchsorted(ids, ids, right=True)
    if rules.key_padding is not None:
        real = rules.key_padding.long()
        first = real.argmax(1, keepdim=True)
        low = low.maximum(first)
        high = high.minimum(first + real.sum(1, keepdim=True))
    if rules.causal:
        high = high.minimum(at + 1)
    # Key j is seen by the queries from the first with high > j to the last with low <= j.
    seen_low = torch.searchsorted(high.contiguous(), at.contiguous(), right=True)
    seen_high = torch.searchsorted(low.contiguous(), at.contiguous(), right=True)
    return torch.stack([low, high, seen_low, seen_high]).int()


def gathered_ranges(q_positions: Tensor, ranges: Tensor | None, length: int) -> Tensor:
    """Where gathered queries stand and which keys they see.

    Args:
        q_positions: ``[batch, queries]``, -1 for padding.
        ranges: of all positions, as ``visible_ranges``.
        length: keys of a row.

    Returns:
        int32 ``[3, batch, queries]``: position, first key, one past the last key, 0 for padding.
    """
    at = q_positions.long()
    real = at >= 0
    low, high = torch.zeros_like(at), torch.full_like(at, length)
    if ranges is not None:
        low, high = (x.gather(1, at.clamp(min=0)) for x in ranges[:2])
    return torch.stack([at, low * real, high * real]).int()


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    ranges: Tensor | None,
    gathered: bool,
    seed: Tensor | None,
    max_distance: int,
    buckets: int,
    paper: bool,
    dropout_p: float,
    head_offset: int,
    scale: float,
) -> Call:
    q, k, v = (_last_contiguous(x) for x in (q, k, v))
    return Call(
        q=q,
        k=k,
        v=v,
        pos_key=pos_key,
        pos_query=pos_query,
        ranges=None if gathered or ranges is None else Ranges(*ranges.unbind()),
        seed=seed,
        positions=RelativePositions(max_distance, buckets),
        p2c_sign=-1 if paper else 1,
        dropout_p=dropout_p,
        head_offset=head_offset,
        scale=scale,
    )


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("megatron_deberta::disentangled_attention", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    ranges: Tensor | None,
    gathered: bool,
    seed: Tensor | None,
    max_distance: int,
    buckets: int,
    paper: bool,
    dropout_p: float,
    head_offset: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    call = _call(
        q, k, v, pos_key, pos_query, ranges, gathered, seed, max_distance, buckets, paper,
        dropout_p, head_offset, scale,
    )  # fmt: skip
    with torch.cuda.device_of(q):  # Triton launches on the current device
        if gathered and ranges is not None:
            return gathered_launch.forward(call, ranges)
        return forward(call)


@_forward_op.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    like = q if q.stride(-1) == 1 else q.contiguous()
    return torch.empty_like(like), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("megatron_deberta::disentangled_attention_backward", mutates_args=())
def _backward_op(
    d_output: Tensor,
    output: Tensor,
    lse2: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    ranges: Tensor | None,
    gathered: bool,
    seed: Tensor | None,
    max_distance: int,
    buckets: int,
    paper: bool,
    dropout_p: float,
    head_offset: int,
    scale: float,
) -> list[Tensor]:
    call = _call(
        q, k, v, pos_key, pos_query, ranges, gathered, seed, max_distance, buckets, paper,
        dropout_p, head_offset, scale,
    )  # fmt: skip
    d_output = _last_contiguous(d_output)
    with torch.cuda.device_of(q):
        if gathered and ranges is not None:
            gradients = gathered_launch.backward(call, ranges, output, lse2, d_output)
        else:
            gradients = backward(call, output, lse2, d_output)
    return [x for x in gradients if x is not None]


@_backward_op.register_fake
def _(
    d_output: Tensor,
    output: Tensor,
    lse2: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    *_: Any,
) -> list[Tensor]:
    like = [torch.empty_like(x if x.stride(-1) == 1 else x.contiguous()) for x in (q, k, v)]
    return like + [x.new_empty(x.shape) for x in (pos_key, pos_query) if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], inputs[7], *output)
    ctx.options = inputs[8:]
    ctx.gathered = inputs[6]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, d_output: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, seed, output, lse2 = ctx.saved_tensors
    options = (ctx.gathered, seed, *ctx.options)
    gradients = iter(_backward_op(d_output, output, lse2, *tensors, *options))
    differentiable = [None if x is None else next(gradients) for x in tensors[:5]]
    return (*differentiable, None, *(None for _ in options))


_forward_op.register_autograd(_differentiate, setup_context=_setup_context)

"""Disentangled attention in torch's memory-efficient kernel, with the position terms as its bias.

For GPUs without the fused kernels, such as V100, where torch's kernel moves much less memory than
`megatron_deberta.ops.batched`. The bias is `[heads, batch, length, length]` in the input's dtype,
computed and differentiated by products as in `batched`; backward computes it and the attention
again, so that no layer keeps it. The kernel draws its own dropout, whose elements depend on the
shapes and on the torch version: recomputed and resumed runs drop the same, other backends, layouts
and micro batches do not. On the CPU torch's unfused implementation runs the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from megatron_deberta.ops import batched, chunked
from megatron_deberta.ops.arguments import (
    AttentionArguments,
    hides_keys,
    query_positions,
    visible_keys,
)
from megatron_deberta.ops.dropout_bits import drop_threshold


def why_not_efficient(q: Tensor) -> str | None:
    """Return why the backend cannot run on these queries, or None if it can.

    Args:
        q: queries ``[batch, heads, q_len, head_dim]``.
    """
    if q.device.type == "cpu":
        return None
    if q.device.type != "cuda":
        return f"torch's kernel runs on CUDA devices, not on {q.device.type}"
    if q.shape[-1] % 8:
        return f"heads have {q.shape[-1]} features and torch's kernel needs a multiple of 8"
    if q.dtype == torch.bfloat16 and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "torch's kernel does not support bfloat16 on this GPU"
    if q.dtype == torch.float64:
        return "torch's kernel does not support float64"
    return None


def attend(a: AttentionArguments) -> tuple[Tensor, Tensor | None]:
    """Compute attention; gathered queries and calls for the log-sum-exp by ``chunked``.

    Args:
        a: checked arguments.

    Returns:
        Output like ``q``, and if requested the log-sum-exp of the scores, float32
        ``[batch, heads, q_len]``.
    """
    if a.q_positions is not None or a.return_lse or not a.k.shape[2]:
        return chunked.attend(a)
    output: Tensor = checkpoint(_attend, a, *a[:5], use_reentrant=False, preserve_rng_state=False)
    return output, None


def _attend(a: AttentionArguments, *tensors: Tensor | None) -> Tensor:
    """Compute attention; ``tensors`` are the differentiable arguments of ``a``."""
    a = AttentionArguments(*tensors, *a[5:])  # type: ignore[call-arg,arg-type]
    bias = None
    if hides_keys(a) or a.pos_key is not None or a.pos_query is not None:
        bias = _Bias.apply(*a._replace(seed=None))
    backend = SDPBackend.MATH if a.q.device.type == "cpu" else SDPBackend.EFFICIENT_ATTENTION
    # Heads stand in the place of rows, as they do in the bias.
    q, k, v = (x.transpose(0, 1) for x in (a.q, a.k, a.v))
    dropout_p = 0.0 if a.seed is None else drop_threshold(a.dropout_p) / 256
    with sdpa_kernel(backend), _seeded(a):
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=a.scale
        )
    output = output.transpose(0, 1)
    if hides_keys(a):
        visible = visible_keys(a, query_positions(a), slice(None)).any(-1)
        output = output.masked_fill(~visible[:, None, :, None], 0.0)
    return output


@contextmanager
def _seeded(a: AttentionArguments) -> Iterator[None]:
    """Seed torch's generators by the rows' seeds and the first head, and restore them."""
    if a.seed is None:
        yield
        return
    # Waits for the device: torch's kernel takes its seed from the host.
    seed = int(a.seed.sum()) + 0x9E3779B97F4A7C15 * a.head_offset
    with torch.random.fork_rng([a.q.device] if a.q.is_cuda else []):
        torch.manual_seed(seed % 2**63)
        yield


class _Bias(torch.autograd.Function):
    """Position terms times the scale, ``[heads, batch, length, length]``; least where hidden."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """Compute the bias; ``args`` are ``AttentionArguments``."""
        a = AttentionArguments(*args)
        ctx.save_for_backward(*args[:5])
        ctx.options = args[5:]
        call = batched.Call(a)
        block, q, k = _whole(call)
        bias = call.new(len(q), q.shape[1], k.shape[1])
        if a.pos_key is None and a.pos_query is None:
            bias.zero_()
        call.add_terms(bias, q, k, block, overwrite=True)
        by_head: Tensor = bias.unflatten(0, (call.heads, -1))
        if block.hidden is not None:
            by_head.masked_fill_(block.hidden, torch.finfo(bias.dtype).min)
        return by_head

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_bias: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, pos_key and pos_query."""
        a = AttentionArguments(*ctx.saved_tensors, *ctx.options)
        call = batched.Call(a)
        block, q, k = _whole(call)
        sums = [torch.zeros_like(x, dtype=call.wide) for x in (q, k)]
        call.add_gradients(d_bias.flatten(0, 1), (q, k), sums, block)
        d_q, d_k = (batched.rows_first(x, call.heads).to(q.dtype) for x in sums)
        return (d_q, d_k, None, *call.table_gradients(), *(None for _ in ctx.options))


def _whole(call: batched.Call) -> tuple[batched.Block, Tensor, Tensor]:
    """Return all of a call as one block, and its queries and keys with heads first."""
    a = call.a
    every = slice(0, a.q.shape[0])
    block = batched.Block(call, every, slice(0, a.q.shape[2]))
    return block, batched.heads_first(a.q, every), batched.heads_first(a.k, every)

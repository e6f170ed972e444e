"""Reference implementation of disentangled attention, which other backends are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_deberta.ops.arguments import AttentionArguments
from megatron_deberta.ops.dropout_bits import keep_mask, keep_scale
from megatron_deberta.ops.visibility import query_positions, visible_keys


def attend(a: AttentionArguments) -> tuple[Tensor, Tensor | None]:
    """Compute attention with full score matrices, in float64 for float64 inputs, else in float32.

    Args:
        a: checked arguments.

    Returns:
        Output like ``q``, and if requested the log-sum-exp of the scores, float32
        ``[batch, heads, q_len]``.

    Source: He et al. 2021, arXiv:2006.03654, Algorithm 1; the release's
    ``disentangled_attention_bias``.
    """
    wide = torch.float64 if a.q.dtype == torch.float64 else torch.float32
    scores = _scores(a, wide)
    at = query_positions(a)
    visible = visible_keys(a, at, slice(None))[:, None]
    # A finite fill value keeps softmax and its gradient finite where no key is visible.
    probabilities = scores.masked_fill(~visible, torch.finfo(wide).min).softmax(-1) * visible
    if a.seed is not None:
        keep = keep_mask(
            a.seed,
            at,
            a.k.shape[2],
            a.dropout_p,
            num_heads=a.q.shape[1],
            head_offset=a.head_offset,
        )
        probabilities = probabilities * keep * keep_scale(a.dropout_p)
    output = torch.einsum("bhqk,bhkd->bhqd", probabilities, a.v.to(wide))
    lse = None
    if a.return_lse:
        hidden = scores.detach().masked_fill(~visible, float("-inf"))
        lse = torch.logsumexp(hidden, -1).float()
    return output.to(a.q.dtype), lse


def _scores(a: AttentionArguments, wide: torch.dtype) -> Tensor:
    """Return the scaled scores ``[batch, heads, q_len, k_len]``: content, c2p and p2c terms."""
    q, k = a.q.to(wide), a.k.to(wide)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
    at = query_positions(a)
    distance = at[:, None, :, None] - torch.arange(k.shape[2], device=q.device)  # [b, 1, q, k]
    if a.pos_key is not None:
        by_slot = torch.einsum("bhqd,hsd->bhqs", q, a.pos_key.to(wide))
        slots = a.positions.slots(distance)
        scores = scores + by_slot.gather(-1, slots.expand_as(scores))
    if a.pos_query is not None:
        by_slot = torch.einsum("bhkd,hsd->bhks", k, a.pos_query.to(wide))
        slots = a.positions.slots(distance if a.p2c_index == "released" else -distance)
        slots = slots.expand_as(scores).transpose(-1, -2)  # [b, h, k, q]
        scores = scores + by_slot.gather(-1, slots).transpose(-1, -2)
    return scores * a.scale

"""Reference implementation of disentangled attention, which other backends are tested against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_deberta.ops.arguments import AttentionArguments
from megatron_deberta.ops.dropout_bits import attention_keep_mask, keep_scale
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
    probabilities = visible_softmax(scores, visible)
    if a.seed is not None:
        keep = attention_keep_mask(
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


def visible_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Return the softmax over visible keys; zeros where a query sees none.

    Args:
        scores: ``[batch, heads, q_len, k_len]``.
        visible: bool, broadcastable to it.
    """
    # A finite fill value keeps softmax and its gradient finite where no key is visible.
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1) * visible


def _scores(a: AttentionArguments, wide: torch.dtype) -> Tensor:
    terms = score_terms(a, wide)
    _, scores = next(terms)
    for _, term in terms:
        scores = scores + term
    return scores * a.scale


def score_terms(a: AttentionArguments, wide: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield name and scores of ``c2c``, then of ``c2p`` and ``p2c`` where they are given.

    Args:
        a: checked arguments.
        wide: dtype of the result.

    Returns:
        Scores before the scale ``[batch, heads, q_len, k_len]``.
    """
    q, k = a.q.to(wide), a.k.to(wide)
    yield "c2c", torch.einsum("bhqd,bhkd->bhqk", q, k)
    at = query_positions(a)
    distance = at[:, None, :, None] - torch.arange(k.shape[2], device=q.device)  # [b, 1, q, k]
    if a.pos_key is not None:
        by_slot = torch.einsum("bhqd,hsd->bhqs", q, a.pos_key.to(wide))
        slots = a.positions.slots(distance)
        yield "c2p", by_slot.gather(-1, slots.expand(*by_slot.shape[:2], *slots.shape[2:]))
    if a.pos_query is not None:
        by_slot = torch.einsum("bhkd,hsd->bhks", k, a.pos_query.to(wide))
        slots = a.positions.slots(distance if a.p2c_index == "microsoft" else -distance)
        slots = slots.expand(*by_slot.shape[:2], *slots.shape[2:]).transpose(-1, -2)  # [b, h, k, q]
        yield "p2c", by_slot.gather(-1, slots).transpose(-1, -2)

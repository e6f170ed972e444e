"""Reference implementation of disentangled attention, which other backends are tested against."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_deberta.ops.arguments import (
    AttentionArguments,
    P2CIndex,
    check_arguments,
    default_scale,
    query_positions,
    score_dtype,
    visible_keys,
)
from megatron_deberta.ops.dropout_bits import attention_keep_mask, keep_scale
from megatron_deberta.ops.relative_positions import RelativePositions


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
    wide = score_dtype(a)
    scores = functools.reduce(torch.add, (term for _, term in score_terms(a, wide))) * a.scale
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


@dataclass(frozen=True, slots=True)
class AttentionMaps:
    """Probabilities and scores of an attention call, float32.

    Attributes:
        probabilities: ``[batch, heads, q_len, k_len]``, the softmax of the sum of the terms.
        terms: ``[batch, heads, q_len, k_len]`` scaled scores: ``c2c``, and ``c2p`` and ``p2c`` if
            the call has them. Those of hidden keys are included.
    """

    probabilities: Tensor
    terms: dict[str, Tensor]


def attention_maps(
    q: Tensor,
    k: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    positions: RelativePositions,
    *,
    causal: bool = False,
    p2c_index: P2CIndex = "microsoft",
) -> AttentionMaps:
    """Return the maps of ``disentangled_attention`` for rows without padding and dropout.

    Args:
        q: ``[batch, heads, len, head_dim]``.
        k: like ``q``.
        pos_key: ``[heads, 2 * span, head_dim]`` or None, as in ``disentangled_attention``.
        pos_query: likewise.
        positions: map from distances to slots.
        causal: as in ``disentangled_attention``.
        p2c_index: likewise.

    Raises:
        ValueError: see ``disentangled_attention``.

    Source: He et al. 2021, arXiv:2006.03654, Eq. 4.
    """
    scale = default_scale(q.shape[-1], pos_key, pos_query)
    a = AttentionArguments(
        q, k, k, pos_key, pos_query, positions, None, None, None, causal, 0.0, None, 0, scale,
        p2c_index, return_lse=False,
    )  # fmt: skip
    check_arguments(a)
    terms = {name: term * scale for name, term in score_terms(a, torch.float32)}
    scores = torch.stack(list(terms.values())).sum(0)
    visible = visible_keys(a, query_positions(a), slice(None))[:, None]
    return AttentionMaps(visible_softmax(scores, visible), terms)

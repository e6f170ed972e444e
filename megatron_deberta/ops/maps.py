"""Attention maps: the probabilities of an attention call and the terms of its scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_deberta.ops.arguments import (
    AttentionArguments,
    P2CIndex,
    check_arguments,
    default_scale,
)
from megatron_deberta.ops.reference import score_terms, visible_softmax
from megatron_deberta.ops.relative_positions import RelativePositions
from megatron_deberta.ops.visibility import query_positions, visible_keys


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

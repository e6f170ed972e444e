"""Visibility of keys: padding, documents, causality and padding queries."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_deberta.ops.arguments import AttentionRules


def query_positions(rules: AttentionRules, q_len: int, device: torch.device) -> Tensor:
    """Return the positions of the queries.

    Args:
        rules: of the call.
        q_len: number of queries.
        device: device of the result.

    Returns:
        int64 ``[batch, q_len]``, -1 for padding; ``[1, q_len]`` if all rows are equal.
    """
    if rules.q_positions is None:
        return torch.arange(q_len, device=device)[None]
    return rules.q_positions.long()


def hides_keys(rules: AttentionRules) -> bool:
    """Return whether any key may be hidden from any query."""
    masks = (rules.key_padding, rules.document_ids, rules.q_positions)
    return rules.causal or any(mask is not None for mask in masks)


def visible_keys(rules: AttentionRules, at: Tensor, rows: slice, k_len: int) -> Tensor:
    """Return which keys a block of queries sees.

    Args:
        rules: of the call.
        at: positions of the block's queries, ``[batch rows or 1, queries]``.
        rows: batch rows of the block.
        k_len: number of keys.

    Returns:
        bool, broadcastable to ``[batch rows, queries, k_len]``, three-dimensional.
    """
    visible = (at >= 0)[:, :, None]
    if rules.key_padding is not None:
        visible = visible & rules.key_padding[rows, None, :]
    if rules.document_ids is not None:
        documents = rules.document_ids[rows]
        own = documents.gather(1, at.clamp(min=0).expand(documents.shape[0], -1))
        visible = visible & (own[:, :, None] == documents[:, None, :])
    if rules.causal:
        visible = visible & (torch.arange(k_len, device=at.device) <= at[:, :, None])
    return visible

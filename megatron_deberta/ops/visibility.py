"""Visibility of keys: padding, documents, causality and padding queries."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_deberta.ops.arguments import AttentionArguments


def query_positions(a: AttentionArguments) -> Tensor:
    """Return the positions of the queries.

    Returns:
        int64 ``[batch, q_len]``, -1 for padding; ``[1, q_len]`` if all rows are equal.
    """
    if a.q_positions is None:
        return torch.arange(a.q.shape[2], device=a.q.device)[None]
    return a.q_positions.long()


def hides_keys(a: AttentionArguments) -> bool:
    """Return whether any key may be hidden from any query."""
    masks = (a.attention_mask, a.document_ids, a.q_positions)
    return a.causal or any(mask is not None for mask in masks)


def visible_keys(a: AttentionArguments, at: Tensor, rows: slice) -> Tensor:
    """Return which keys a block of queries sees.

    Args:
        a: arguments of the call.
        at: positions of the block's queries, ``[batch rows or 1, queries]``.
        rows: batch rows of the block.

    Returns:
        bool, broadcastable to ``[batch rows, queries, k_len]``, three-dimensional.
    """
    visible = (at >= 0)[:, :, None]
    if a.attention_mask is not None:
        visible = visible & a.attention_mask[rows, None, :]
    if a.document_ids is not None:
        documents = a.document_ids[rows]
        own = documents.gather(1, at.clamp(min=0).expand(documents.shape[0], -1))
        visible = visible & (own[:, :, None] == documents[:, None, :])
    if a.causal:
        visible = visible & (torch.arange(a.k.shape[2], device=at.device) <= at[:, :, None])
    return visible

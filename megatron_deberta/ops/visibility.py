"""Which query may see which key: padding, documents, causality, queries that are padding."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_deberta.ops.arguments import AttentionArguments


def query_positions(a: AttentionArguments) -> Tensor:
    """Where the queries stand, int64 ``[batch or 1, q_len]``, -1 for padding.

    Args:
        a: checked arguments.
    """
    if a.q_positions is None:
        return torch.arange(a.q.shape[2], device=a.q.device)[None]
    return a.q_positions.long()


def visible_keys(
    a: AttentionArguments, rows: slice = slice(None), queries: slice = slice(None)
) -> Tensor | None:
    """Which keys a block of queries sees.

    Args:
        a: checked arguments.
        rows: batch rows of the block.
        queries: queries of the block.

    Returns:
        bool, broadcastable to ``[batch rows, queries, k_len]``; None where everything is visible.
    """
    visible: Tensor | None = None

    def narrow(mask: Tensor) -> None:
        nonlocal visible
        visible = mask if visible is None else visible & mask

    at = query_positions(a)
    at = at[rows if a.q_positions is not None else slice(None), queries]
    if a.key_padding is not None:
        narrow(a.key_padding[rows, None, :])
    if a.document_ids is not None:
        documents = a.document_ids[rows]
        own = documents.gather(1, at.clamp(min=0).expand(documents.shape[0], -1))
        narrow(own[:, :, None] == documents[:, None, :])
    if a.causal:
        narrow(torch.arange(a.k.shape[2], device=a.q.device) <= at[:, :, None])
    if a.q_positions is not None:
        narrow((at >= 0)[:, :, None])
    return visible

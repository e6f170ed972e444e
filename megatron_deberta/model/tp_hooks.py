"""Tensor-parallel hooks: the modules that ``distributed.parallelize`` replaces.

On one device they do nothing. Every hook receives the `TokenLayout` of its input, because the last
layer works on the token sequence in the encoder and on picked rows in the mask decoder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.model.fused import PendingResidual, layer_norm


@dataclass(frozen=True)
class TokenLayout:
    """Which tokens the rows of a hidden-state tensor ``[B, R, D]`` are."""

    positions: Tensor
    """int64 ``[B, R]``: place of the token in its row of the batch; keys dropout. -1 = padding."""
    position_ids: Tensor
    """int64 ``[B, R]``: absolute position, which restarts in packed documents."""
    real: Tensor
    """bool ``[B, R]``: False for padding."""
    sequence: bool
    """True: the token sequence, of which a rank may hold a shard; False: whole on every rank."""
    token_types: Tensor | None = None
    """int64 ``[B, R]``: segment of a pair; None: all are of the first. Read at the input only."""

    @staticmethod
    def of_sequence(
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> TokenLayout:
        """Layout of a whole batch; ``attention_mask`` is bool ``[B, N]``, True = real token."""
        positions = torch.arange(attention_mask.size(1), device=attention_mask.device)
        positions = positions.expand(attention_mask.shape)
        ids = positions if position_ids is None else position_ids
        return TokenLayout(positions, ids, attention_mask, sequence=True, token_types=token_types)

    def pick(self, picked: Tensor) -> TokenLayout:
        """The rows at places ``picked`` (int64 ``[B, M]``, -1 = padding), whole on every rank."""
        place = picked.clamp(min=0)
        return TokenLayout(picked, self.position_ids.gather(1, place), picked >= 0, sequence=False)

    def whole(self) -> TokenLayout:
        """The same rows once every rank holds all of them."""
        return replace(self, sequence=False)


class SequenceEntry(nn.Module):
    """Where the token sequence may be split over ranks: rows of the batch -> rows held here."""

    def forward(self, layout: TokenLayout) -> TokenLayout:
        """Return the rows that this rank holds."""
        return layout


class SequenceExit(nn.Module):
    """Where the split ends: hidden states held here -> hidden states of all rows."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``[B, N, D]``; the consumer must compute the same on every rank."""
        return hidden


class BlockInput(nn.Module):
    """Residual stream -> what a block's (split) projections read."""

    def forward(self, hidden: Tensor, layout: TokenLayout) -> Tensor:
        """Return all N tokens where ``layout.sequence``, else the same rows."""
        return hidden


class SharedInput(nn.Module):
    """A replicated tensor -> the same, read by projections that are split."""

    def forward(self, value: Tensor) -> Tensor:
        """Return ``value``."""
        return value


class BlockOutput(nn.Linear):
    """A block's last projection, back into the residual stream."""

    def forward(self, input: Tensor, layout: TokenLayout) -> Tensor:  # type: ignore[override]
        """Return ``[B, R, D]`` for the rows held here."""
        return F.linear(input, self.weight, self.bias)


class PositionEmbedding(nn.Embedding):
    """Absolute positions of residual-stream rows."""

    def forward(self, layout: TokenLayout) -> Tensor:  # type: ignore[override]
        """Return ``[B, R, D]`` for the rows held here."""
        return F.embedding(layout.position_ids, self.weight)


class TokenTypeEmbedding(nn.Embedding):
    """Which segment of a pair residual-stream rows belong to."""

    def forward(self, layout: TokenLayout) -> Tensor:  # type: ignore[override]
        """Return ``[B, R, D]`` for the rows held here."""
        return F.embedding(token_types(layout), self.weight)


def token_types(layout: TokenLayout) -> Tensor:
    """Token types int64 ``[B, R]`` of rows, which are 0 where none are given."""
    return torch.zeros_like(layout.positions) if layout.token_types is None else layout.token_types


class LayerNorm(nn.LayerNorm):
    """LayerNorm of residual-stream rows."""

    def forward(self, input: Tensor | PendingResidual, layout: TokenLayout) -> Tensor:  # type: ignore[override]
        """Normalise ``[B, R, D]`` over D."""
        return layer_norm(input, self.weight, self.bias, self.eps)


class ChannelExit(nn.Module):
    """Convolution output, split over channels -> residual-stream rows."""

    def forward(self, value: Tensor, layout: TokenLayout) -> Tensor:
        """Return ``[B, R, D]`` for the rows held here."""
        return value

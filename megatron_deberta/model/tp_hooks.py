"""Tensor-parallel hooks: modules that ``distributed.parallelize`` replaces.

On one device they do not communicate. Hooks receive the `TokenLayout` of their input, because the
last layer processes the token sequence in the encoder and selected tokens in the mask decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.model.fused import PendingResidual, layer_norm
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.model.projections import project_together


@dataclass(frozen=True)
class TokenLayout:
    """Tokens that the rows of a hidden-state tensor ``[B, R, D]`` stand for.

    Attributes:
        positions: int64 ``[B, R]``: index of the token in its sequence, a dropout key; -1 =
            padding.
        position_ids: int64 ``[B, R]``: absolute position, which restarts in packed documents.
        is_token: bool ``[B, R]``: False for padding.
        sequence: True: the token sequence, possibly sharded over ranks; False: replicated on all
            ranks.
        token_types: int64 ``[B, R]``: segment of a pair; None: all 0. Used by the embeddings only.
    """

    positions: Tensor
    position_ids: Tensor
    is_token: Tensor
    sequence: bool
    token_types: Tensor | None = None

    @staticmethod
    def of_sequence(inputs: ModelInputs) -> TokenLayout:
        """Return the layout of a batch ``[B, N]``."""
        ids = inputs.input_ids
        positions = torch.arange(ids.size(1), device=ids.device).expand(ids.shape)
        position_ids = positions if inputs.position_ids is None else inputs.position_ids
        return TokenLayout(positions, position_ids, inputs.is_token, True, inputs.token_type_ids)

    def select(self, positions: Tensor) -> TokenLayout:
        """Return the layout of the tokens at ``positions``, int64 ``[B, M]``, -1 = padding."""
        ids = self.position_ids.gather(1, positions.clamp(min=0))
        return TokenLayout(positions, ids, positions >= 0, sequence=False)

    def replicated(self) -> TokenLayout:
        """Return the layout of the same tokens after they were gathered on all ranks."""
        return replace(self, sequence=False)


class SequenceEntry(nn.Module):
    """Start of the part that sequence parallelism shards."""

    def forward(self, layout: TokenLayout) -> TokenLayout:
        """Return the layout of the local tokens."""
        return layout


class SequenceExit(nn.Module):
    """End of the part that sequence parallelism shards."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Gather ``[B, N, D]``; the consumer must compute the same on every rank."""
        return hidden


class BlockInput(nn.Module):
    """Input of a block's column-parallel projections.

    Args:
        per_token: nothing between ``project`` and the block's `BlockOutput` depends on the order
            of tokens. With sequence parallelism, ``project`` may then return another.
    """

    def __init__(self, *, per_token: bool = False) -> None:
        super().__init__()
        self.per_token = per_token

    def forward(self, hidden: Tensor, layout: TokenLayout) -> Tensor:
        """Gather ``[B, R, D] -> [B, N, D]`` if ``layout.sequence``; otherwise return ``hidden``."""
        return hidden

    def project(
        self,
        hidden: Tensor,
        layout: TokenLayout,
        layers: Sequence[nn.Linear],
        *,
        with_bias: bool = True,
    ) -> tuple[Tensor, ...]:
        """Apply column-parallel layers to what ``forward`` returns; see `project_together`."""
        return project_together(hidden, layers, with_bias=with_bias)


class SharedInput(nn.Module):
    """Replicated tensor that column-parallel projections read."""

    def forward(self, value: Tensor) -> Tensor:
        """Return ``value``; under tensor parallelism its gradient is summed over the ranks.

        Args:
            value: any shape.
        """
        return value


class BlockOutput(nn.Linear):
    """Row-parallel output projection of a block.

    Args:
        in_features: of all ranks.
        out_features: of all ranks.
        per_token: as in the block's `BlockInput`.
    """

    def __init__(self, in_features: int, out_features: int, *, per_token: bool = False) -> None:
        super().__init__(in_features, out_features)
        self.per_token = per_token

    def forward(self, input: Tensor, layout: TokenLayout) -> Tensor:  # type: ignore[override]
        """Return ``[B, R, D]`` for the local tokens."""
        return F.linear(input, self.weight, self.bias)


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        # Normal values on the meta device would import the compiler, which takes seconds.
        if not self.weight.is_meta:
            super().reset_parameters()


class TokenEmbedding(_Embedding):
    """Token embedding, with one row per piece of the vocabulary."""


class PositionEmbedding(_Embedding):
    """Absolute-position embedding."""

    def forward(self, layout: TokenLayout) -> Tensor:  # type: ignore[override]
        """Return ``[B, R, D]`` for the local tokens."""
        return F.embedding(layout.position_ids, self.weight)


class TokenTypeEmbedding(_Embedding):
    """Token-type (segment) embedding."""

    def forward(self, layout: TokenLayout) -> Tensor:  # type: ignore[override]
        """Return ``[B, R, D]`` for the local tokens."""
        return F.embedding(token_types(layout), self.weight)


def token_types(layout: TokenLayout) -> Tensor:
    """Return the token types of a layout, int64 ``[B, R]``; 0 where none are given."""
    return torch.zeros_like(layout.positions) if layout.token_types is None else layout.token_types


class LayerNorm(nn.LayerNorm):
    """LayerNorm of the residual stream."""

    def forward(self, input: Tensor | PendingResidual, layout: TokenLayout) -> Tensor:  # type: ignore[override]
        """Normalise ``[B, R, D]`` over D."""
        return layer_norm(input, self.weight, self.bias, self.eps)


class ChannelExit(nn.Module):
    """Output of the channel-parallel convolution."""

    def forward(self, value: Tensor, layout: TokenLayout) -> Tensor:
        """Return ``[B, R, D]`` for the local tokens."""
        return value

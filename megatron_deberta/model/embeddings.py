"""Token embeddings, absolute positions at the input, and the relative-position table."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.dropout import Dropout, DropoutSeeds
from megatron_deberta.model.tp_hooks import (
    LayerNorm,
    PositionEmbedding,
    SequenceEntry,
    SharedInput,
    TokenLayout,
    TokenTypeEmbedding,
)


class Embeddings(nn.Module):
    """Tokens (and absolute positions and token types, where there are) -> first hidden states.

    Source: He et al. 2021, arXiv:2006.03654, section 3.2; the release's order of LayerNorm,
    padding mask and dropout.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.entry = SequenceEntry()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = (
            PositionEmbedding(config.max_position_embeddings, config.hidden_size)
            if config.absolute_positions == "input"
            else None
        )
        self.token_type = (
            TokenTypeEmbedding(config.type_vocab_size, config.hidden_size)
            if config.type_vocab_size > 0
            else None
        )
        self.norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout, "embeddings")

    def forward(
        self, input_ids: Tensor, layout: TokenLayout, seeds: DropoutSeeds | None
    ) -> tuple[Tensor, TokenLayout]:
        """Return hidden states ``[B, R, D]`` and the rows they are.

        Args:
            input_ids: int64 ``[B, N]``.
            layout: all N rows of the batch.
            seeds: keys of dropout; None turns it off.
        """
        held = self.entry(layout)
        hidden = self.token(input_ids)
        if self.position is not None:
            hidden = hidden + self.position(held)
        if self.token_type is not None:
            hidden = hidden + self.token_type(held)
        hidden = self.norm(hidden, held) * held.real.unsqueeze(-1)
        return self.dropout(hidden, held.positions, seeds), held


class RelativePositionTable(nn.Module):
    """The table of relative-position vectors that all layers share.

    Source: He et al. 2021, arXiv:2006.03654, section 3.1 (P, shared by all layers); the LayerNorm
    on it came with the release's v2.
    """

    def __init__(self, config: ModelConfig, num_slots: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_slots, config.hidden_size))
        self.norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            if config.normalize_position_table
            else nn.Identity()
        )
        self.shared = SharedInput()

    def forward(self) -> Tensor:
        """Return the normalised table ``[S, D]``, ready to be projected in every layer."""
        table: Tensor = self.shared(self.norm(self.weight))
        return table

"""The enhanced mask decoder: absolute positions enter just before the masked tokens are decoded."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.attention import AttentionContext
from megatron_deberta.model.layers import Layer
from megatron_deberta.model.tp_hooks import PositionEmbedding, TokenLayout


class EnhancedMaskDecoder(nn.Module):
    """Decode picked rows with the encoder's own last layer, several times.

    Source: He et al. 2021, arXiv:2006.03654, section 3.3; what was released: the first query is
    the last layer's input plus absolute positions, keys and values always come from that input,
    and the layer runs twice with shared weights. Computing only the picked rows is exact, because
    no row's output depends on another query.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_passes = config.mask_decoder_passes
        self.position = (
            PositionEmbedding(config.max_position_embeddings, config.hidden_size)
            if config.absolute_positions == "decoder"
            else None
        )

    def forward(
        self,
        hidden: Tensor,
        layout: TokenLayout,
        picked: Tensor,
        last_layer: Layer,
        context: AttentionContext,
        *,
        with_first: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Decode.

        Args:
            hidden: ``[B, N, D]`` input of the last layer, whole on every rank.
            layout: those rows.
            picked: int64 ``[B, M]`` row positions to decode, -1 = padding.
            last_layer: the encoder's last layer.
            context: what all attention layers share.
            with_first: compute the last layer's ordinary output at [CLS], too.

        Returns:
            ``[B, M, D]`` decoded states, and ``[B, D]`` or None.
        """
        attention = last_layer.attention
        memory = attention.project_key_value(attention.input(hidden, layout), context)
        picked_rows = layout.pick(picked)
        query = pick_rows(hidden, picked)
        if self.position is not None:
            query = query + self.position(picked_rows)
        for decoder_pass in range(1, self.num_passes + 1):
            seeds = None if context.seeds is None else context.seeds.at_pass(decoder_pass)
            query = last_layer(query, picked_rows, replace(context, seeds=seeds), memory)
        if not with_first:
            return query, None
        first = torch.zeros_like(picked[:, :1])
        ordinary = last_layer(pick_rows(hidden, first), layout.pick(first), context, memory)
        return query, ordinary[:, 0]


def pick_rows(hidden: Tensor, picked: Tensor) -> Tensor:
    """``[B, N, D]`` at ``picked`` ``[B, M]`` (-1 reads row 0) -> ``[B, M, D]``."""
    place = picked.clamp(min=0).unsqueeze(-1).expand(-1, -1, hidden.size(-1))
    return hidden.gather(1, place)

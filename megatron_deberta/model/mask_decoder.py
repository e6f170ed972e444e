"""Enhanced mask decoder: absolute positions are added before the masked tokens are decoded."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.attention import AttentionContext, KeyValue
from megatron_deberta.model.layers import Layer
from megatron_deberta.model.tp_hooks import PositionEmbedding, TokenLayout


class EnhancedMaskDecoder(nn.Module):
    """Decode selected tokens with repeated passes of the encoder's last layer.

    Source: He et al. 2021, arXiv:2006.03654, section 3.3, as in the released code: the first query
    is the last layer's input plus absolute positions, keys and values always come from that input,
    and the layer runs twice with shared weights. Decoding only the selected tokens is exact,
    because no output depends on another query.

    With ``context.causal``, the output at a position depends on the tokens up to there, so that it
    may predict the next one.
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
        masked_positions: Tensor,
        last_layer: Layer,
        context: AttentionContext,
        *,
        with_first: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Decode the tokens at ``masked_positions``.

        Args:
            hidden: ``[B, N, D]`` input of the last layer, replicated on all ranks.
            layout: tokens of ``hidden``.
            masked_positions: int64 ``[B, M]`` positions to decode, -1 = padding.
            last_layer: the encoder's last layer.
            context: inputs shared by all layers.
            with_first: also compute the last layer's ordinary output at [CLS].

        Returns:
            ``[B, M, D]`` decoded states, and the [CLS] output ``[B, D]`` or None.
        """
        attention = last_layer.attention
        key_value = attention.project_key_value(hidden, layout, context)
        masked_layout = layout.select(masked_positions)
        query = gather_tokens(hidden, masked_positions)
        query = self.decode(query, masked_layout, last_layer, context, key_value)
        if not with_first:
            return query, None
        cls = torch.zeros_like(masked_positions[:, :1])
        output = last_layer(gather_tokens(hidden, cls), layout.select(cls), context, key_value)
        return query, output[:, 0]

    def decode(
        self,
        query: Tensor,
        layout: TokenLayout,
        last_layer: Layer,
        context: AttentionContext,
        key_value: KeyValue,
    ) -> Tensor:
        """Run the passes of the decoder for given queries, keys and values.

        Args:
            query: ``[B, M, D]``, the last layer's inputs at the decoded tokens.
            layout: tokens of ``query``.
            last_layer: the encoder's last layer.
            context: inputs shared by all layers.
            key_value: keys and values of all tokens.

        Returns:
            ``[B, M, D]``.
        """
        if self.position is not None:
            query = query + self.position(layout)
        for decoder_pass in range(1, self.num_passes + 1):
            seeds = None if context.seeds is None else context.seeds.at_pass(decoder_pass)
            query = last_layer(query, layout, replace(context, seeds=seeds), key_value)
        return query


def gather_tokens(hidden: Tensor, positions: Tensor) -> Tensor:
    """Gather ``[B, M, D]`` from ``[B, N, D]`` at positions ``[B, M]``; -1 reads position 0."""
    rows, length, _ = hidden.shape
    starts = torch.arange(0, rows * length, length, device=hidden.device).unsqueeze(1)
    # Backward of an embedding is deterministic on CUDA, where that of ``gather`` sorts and waits.
    return functional.embedding(positions.clamp(min=0) + starts, hidden.flatten(0, 1))

"""Encoder (layers, shared relative-position table, recomputation) and enhanced mask decoder."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.attention import AttentionContext, KeyValue, PositionTable
from megatron_deberta.model.embeddings import RelativePositionTable
from megatron_deberta.model.inputs import TokenInfo, gather_tokens
from megatron_deberta.model.layers import ConvolutionBranch, Layer
from megatron_deberta.model.parallel_layers import ReplicatedEmbedding
from megatron_deberta.ops import RelativePositions


class Encoder(nn.Module):
    """Transformer layers with their relative-position table and convolution."""

    def __init__(self, config: ModelConfig, recompute_layers: bool) -> None:
        super().__init__()
        self.recompute_layers = recompute_layers
        span = RelativePositions(config.max_relative_positions, config.position_buckets or 0).span
        self.relative_positions = (
            RelativePositionTable(config, 2 * span) if config.position_terms != "none" else None
        )
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.conv = ConvolutionBranch(config) if config.conv_kernel_size is not None else None

    def position_table(self, slots: range | None = None) -> PositionTable | None:
        """Return the normalised relative-position table, or None.

        Args:
            slots: return only these rows; None: all.
        """
        if self.relative_positions is None:
            return None
        rows: Tensor = self.relative_positions(slots)
        used = slots or range(len(rows))
        return PositionTable(rows, used, torch.arange(used.start, used.stop, device=rows.device))

    def forward(
        self, embedded: Tensor, tokens: TokenInfo, context: AttentionContext, num_layers: int
    ) -> Tensor:
        """Run the first ``num_layers`` layers.

        Args:
            embedded: ``[B, R, D]``, output of the embeddings; local to the rank under sequence
                parallelism.
            tokens: those of ``embedded``.
            context: inputs shared by all layers.
            num_layers: number of layers to run.

        Returns:
            ``[B, R, D]``.
        """
        hidden = embedded
        for index, layer in enumerate(self.layers[:num_layers]):
            if self.recompute_layers and self.training:
                hidden = checkpoint(
                    layer, hidden, tokens, context, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = layer(hidden, tokens, context)
            if index == 0 and self.conv is not None:
                hidden = self.conv(embedded, hidden, tokens, context)
        return hidden


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
            ReplicatedEmbedding(config.max_position_embeddings, config.hidden_size)
            if config.absolute_positions == "decoder"
            else None
        )

    def forward(
        self,
        hidden: Tensor,
        tokens: TokenInfo,
        masked_positions: Tensor,
        last_layer: Layer,
        context: AttentionContext,
        *,
        output_positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Decode the tokens at ``masked_positions``.

        Args:
            hidden: ``[B, N, D]`` input of the last layer, replicated on all ranks.
            tokens: those of ``hidden``.
            masked_positions: int64 ``[B, M]`` positions to decode, -1 = padding; in training each
                at most once.
            last_layer: the encoder's last layer.
            context: inputs shared by all layers.
            output_positions: int64 ``[B, K]`` positions at which the last layer's ordinary output
                is computed too, -1 = padding; None: nowhere.

        Returns:
            ``[B, M, D]`` decoded states, and these outputs ``[B, K, D]`` or None.
        """
        attention = last_layer.attention
        key_value = attention.project_key_value(hidden, tokens, context)
        masked_tokens = tokens.select(masked_positions)
        query = gather_tokens(hidden, masked_positions)
        query = self.decode(query, masked_tokens, last_layer, context, key_value)
        if output_positions is None:
            return query, None
        states, read = gather_tokens(hidden, output_positions), tokens.select(output_positions)
        return query, last_layer(states, read, context, key_value)

    def decode(
        self,
        query: Tensor,
        tokens: TokenInfo,
        last_layer: Layer,
        context: AttentionContext,
        key_value: KeyValue,
    ) -> Tensor:
        """Run the passes of the decoder for given queries, keys and values.

        Args:
            query: ``[B, M, D]``, the last layer's inputs at the decoded tokens.
            tokens: those of ``query``.
            last_layer: the encoder's last layer.
            context: inputs shared by all layers.
            key_value: keys and values of all tokens.

        Returns:
            ``[B, M, D]``.
        """
        if self.position is not None:
            query = query + self.position(tokens.position_ids, tokens.is_sequence)
        for decoder_pass in range(1, self.num_passes + 1):
            seeds = None if context.seeds is None else context.seeds.at_pass(decoder_pass)
            of_pass = replace(context, seeds=seeds, distinct_queries=self.training)
            query = last_layer(query, tokens, of_pass, key_value)
        return query

"""Transformer encoder: layers, shared relative-position table, activation recomputation."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.attention import AttentionContext
from megatron_deberta.model.embeddings import RelativePositionTable
from megatron_deberta.model.layers import ConvolutionBranch, Layer
from megatron_deberta.model.tp_hooks import TokenLayout
from megatron_deberta.ops import RelativePositions


class Encoder(nn.Module):
    """Transformer layers with their relative-position table and convolution."""

    def __init__(self, config: ModelConfig, recompute_layers: bool) -> None:
        super().__init__()
        self.recompute_layers = recompute_layers
        span = RelativePositions(config.max_relative_positions, config.position_buckets or 0).span
        self.num_slots = 2 * span
        self.relative_positions = (
            RelativePositionTable(config, self.num_slots)
            if config.position_terms != "none"
            else None
        )
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.conv = ConvolutionBranch(config) if config.conv_kernel_size is not None else None

    def position_table(self, slots: range | None = None) -> Tensor | None:
        """Return the normalised relative-position table ``[S, D]``, or None.

        Args:
            slots: return only these rows; None: all.
        """
        if self.relative_positions is None:
            return None
        table: Tensor = self.relative_positions(slots)
        return table

    def forward(
        self, embedded: Tensor, layout: TokenLayout, context: AttentionContext, num_layers: int
    ) -> Tensor:
        """Run the first ``num_layers`` layers.

        Args:
            embedded: ``[B, R, D]``, output of the embeddings; local to the rank under sequence
                parallelism.
            layout: tokens of ``embedded``.
            context: inputs shared by all layers.
            num_layers: number of layers to run.

        Returns:
            ``[B, R, D]``.
        """
        hidden = embedded
        for index, layer in enumerate(self.layers[:num_layers]):
            if self.recompute_layers and self.training:
                hidden = checkpoint(
                    layer, hidden, layout, context, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = layer(hidden, layout, context)
            if index == 0 and self.conv is not None:
                hidden = self.conv(embedded, hidden, layout, context)
        return hidden

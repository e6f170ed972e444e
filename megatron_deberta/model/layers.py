"""Feed-forward block, transformer layer, and the convolution added to the first layer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.attention import AttentionContext, DisentangledSelfAttention, KeyValue
from megatron_deberta.model.dropout import Dropout
from megatron_deberta.model.fused import bias_gelu
from megatron_deberta.model.inputs import TokenInfo
from megatron_deberta.model.parallel_layers import (
    ColumnParallelInput,
    GatherFromTensorParallelRegion,
    LayerNorm,
    RowParallelLinear,
)


class FeedForward(nn.Module):
    """Two projections with an erf GELU between, then dropout, residual and LayerNorm."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input = ColumnParallelInput(per_token=True)
        self.up = nn.Linear(config.hidden_size, config.ffn_hidden_size)
        self.down = RowParallelLinear(config.ffn_hidden_size, config.hidden_size, per_token=True)
        self.norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout, f"encoder.layers.{index}.ffn")

    def forward(self, hidden: Tensor, tokens: TokenInfo, context: AttentionContext) -> Tensor:
        """Compute LayerNorm(hidden + dropout(down(GELU(up(hidden))))).

        Args:
            hidden: ``[B, R, D]``.
            tokens: those of ``hidden``.
            context: inputs shared by all layers.

        Returns:
            ``[B, R, D]``.
        """
        # With fusion the bias is added together with GELU.
        (inner,) = self.input.project(
            hidden, tokens.is_sequence, (self.up,), with_bias=not self._fuses
        )
        if context.recompute_cheap:
            # Recomputation stops at the last missing tensor, GELU's output, so the down projection
            # and its communication are not repeated.
            out = checkpoint(
                self._activate,
                inner,
                tokens.is_sequence,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            out = self._activate(inner, tokens.is_sequence)
        pre_norm = self.dropout.before_norm(out, tokens.positions, context.seeds, residual=hidden)
        normalised: Tensor = self.norm(pre_norm, tokens.is_sequence)
        return normalised

    @property
    def _fuses(self) -> bool:
        """Only in training: evaluation has rows of many lengths, each to be compiled."""
        return self.dropout.execution.fuse and self.training

    def _activate(self, inner: Tensor, is_sequence: bool) -> Tensor:
        activated = bias_gelu(inner, self.up.bias) if self._fuses else F.gelu(inner)
        out: Tensor = self.down(activated, is_sequence)
        return out


class Layer(nn.Module):
    """One transformer layer: disentangled attention, then feed-forward."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention = DisentangledSelfAttention(config, index)
        self.ffn = FeedForward(config, index)

    def forward(
        self,
        hidden: Tensor,
        tokens: TokenInfo,
        context: AttentionContext,
        key_value: KeyValue | None = None,
    ) -> Tensor:
        """Map ``[B, R, D]`` to ``[B, R, D]``; arguments as in `DisentangledSelfAttention`."""
        attended = self.attention(hidden, tokens, context, key_value)
        out: Tensor = self.ffn(attended, tokens, context)
        return out


class TokenConv1d(nn.Conv1d):
    """Convolution over tokens, zero-padded at the edges of rows and of packed documents."""

    def forward(  # type: ignore[override]
        self, hidden: Tensor, document_ids: Tensor | None, causal: bool = False
    ) -> Tensor:
        """Map ``[B, N, D]`` to ``[B, N, C]``.

        Args:
            hidden: all tokens.
            document_ids: int64 ``[B, N]``; None: each row is one sequence.
            causal: zeros take the place of later tokens.
        """
        if hidden.device.type != "cpu":
            return self.as_one_product(hidden, document_ids, causal)
        # On CPU results keep their rounding.
        radius = self.kernel_size[0] // 2
        if document_ids is None:
            channels = hidden.transpose(1, 2)
            if causal:
                weight = self.weight[:, :, : radius + 1]
                return F.conv1d(F.pad(channels, (radius, 0)), weight, self.bias).transpose(1, 2)
            return F.conv1d(channels, self.weight, self.bias, padding=self.padding).transpose(1, 2)
        out: Tensor | None = None
        for tap, shifted in enumerate(self._taps(hidden, document_ids, causal)):
            part = F.linear(shifted, self.weight[:, :, tap], self.bias if tap == radius else None)
            out = part if out is None else out + part
        assert out is not None
        return out

    def as_one_product(
        self, hidden: Tensor, document_ids: Tensor | None, causal: bool = False
    ) -> Tensor:
        """Compute the same as ``forward`` by one matrix product; arguments as in ``forward``.

        The K taps stand side by side, ``[B, N, K D]``. On GPUs cuDNN would run a slower
        deterministic convolution of a transposed view.
        """
        taps = self._taps(hidden, document_ids, causal)
        weight = self.weight[:, :, : len(taps)].transpose(1, 2).flatten(1)
        return F.linear(torch.cat(taps, dim=-1), weight, self.bias)

    def _taps(self, hidden: Tensor, document_ids: Tensor | None, causal: bool) -> list[Tensor]:
        """Return the shifted tokens that each tap multiplies, 0 outside of the document."""
        radius, length = self.kernel_size[0] // 2, hidden.size(1)
        taps = range(radius + 1 if causal else self.kernel_size[0])
        padded = F.pad(hidden, (0, 0, radius, radius))
        shifted = [padded[:, tap : tap + length] for tap in taps]
        if document_ids is None:
            return shifted
        # Document ids are not negative, so padding belongs to no document.
        ids = F.pad(document_ids, (radius, radius), value=-1)
        same = [ids[:, tap : tap + length] == document_ids for tap in taps]
        return [x * own.unsqueeze(-1) for x, own in zip(shifted, same, strict=True)]


class ConvolutionBranch(nn.Module):
    """Convolution of the embedding output, added to the first layer's output.

    Source: the released 1.5B model (He et al. 2021, arXiv:2006.03654, section 5.3 and the
    release's ``ConvLayer``).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.conv_kernel_size
        assert size is not None
        self.input = ColumnParallelInput()
        self.conv = TokenConv1d(config.hidden_size, config.hidden_size, size, padding=size // 2)
        self.exit = GatherFromTensorParallelRegion()
        self.norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout, "encoder.conv")
        self.activation: Literal["gelu", "tanh"] = config.conv_activation

    def forward(
        self,
        embedded: Tensor,
        layer_output: Tensor,
        tokens: TokenInfo,
        context: AttentionContext,
    ) -> Tensor:
        """Compute LayerNorm(layer_output + act(dropout(conv(embedded)))).

        Args:
            embedded: ``[B, R, D]``, input of the first layer.
            layer_output: ``[B, R, D]``, output of the first layer.
            tokens: those of both.
            context: inputs shared by all layers.

        Returns:
            ``[B, R, D]``, zero at padding.
        """
        every = self.input(embedded, tokens.is_sequence)
        convolved = self.conv(every, context.document_ids, context.causal)
        mask = tokens.is_token.unsqueeze(-1)
        convolved = self.exit(convolved, tokens.is_sequence) * mask
        convolved = self.dropout(convolved, tokens.positions, context.seeds)
        activated = F.gelu(convolved) if self.activation == "gelu" else torch.tanh(convolved)
        out: Tensor = self.norm(layer_output + activated, tokens.is_sequence) * mask
        return out

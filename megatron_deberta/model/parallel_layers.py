"""Layers that tensor and sequence parallelism replace, with Megatron-LM's names.

On one device they do not communicate; `distributed.parallelize` replaces them by layers that do.
Some take ``is_sequence``: whether the rows of a tensor are the token sequence, which sequence
parallelism shards over ranks, or tokens that are replicated on all ranks. The last layer runs on
the sequence in the encoder and on selected tokens in the mask decoder.

Column-parallel layers of one input are one matrix product. Their weights remain separate parameters
under canonical names; they are concatenated for the product in forward and again in backward, and
the concatenated copy is not saved. With tensor parallelism, the reduction of the input's gradient
over ranks runs while the gradients of the weights are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megatron_deberta.model.fused import PendingResidual, layer_norm
from megatron_deberta.model.inputs import TokenInfo


class ScatterToSequenceParallelRegion(nn.Module):
    """Start of the layers whose tokens sequence parallelism shards."""

    def forward(self, tokens: TokenInfo) -> TokenInfo:
        """Return the local tokens."""
        return tokens


class GatherFromSequenceParallelRegion(nn.Module):
    """End of the layers whose tokens sequence parallelism shards."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Gather ``[B, N, D]``; the consumer must compute the same on every rank."""
        return hidden


class CopyToTensorParallelRegion(nn.Module):
    """Replicated tensor that column-parallel layers read."""

    def forward(self, value: Tensor) -> Tensor:
        """Return ``value``; under tensor parallelism its gradient is summed over the ranks.

        Args:
            value: any shape.
        """
        return value


class GatherFromTensorParallelRegion(nn.Module):
    """Output of the channel-parallel convolution."""

    def forward(self, value: Tensor, is_sequence: bool) -> Tensor:
        """Return all channels ``[B, R, D]`` of the local tokens."""
        return value


class GatherFromDataParallelRegion(nn.Module):
    """Rows of the global batch, for losses that compare its samples."""

    def forward(self, rows: Tensor) -> tuple[Tensor, int]:
        """Return the rows of all ranks, and the number of the first one of this rank.

        Args:
            rows: ``[M, ...]``, as many on every rank.
        """
        return rows, 0


class ColumnParallelInput(nn.Module):
    """Input of column-parallel layers, which are ``nn.Linear`` with fewer outputs.

    Args:
        per_token: nothing between ``project`` and the block's `RowParallelLinear` depends on the
            order of tokens. With sequence parallelism, ``project`` may then return another.
    """

    def __init__(self, *, per_token: bool = False) -> None:
        super().__init__()
        self.per_token = per_token

    def forward(self, hidden: Tensor, is_sequence: bool) -> Tensor:
        """Return the tokens of all ranks, ``[B, R, D] -> [B, N, D]``."""
        return hidden

    def project(
        self,
        hidden: Tensor,
        is_sequence: bool,
        layers: Sequence[nn.Linear],
        *,
        with_bias: bool = True,
    ) -> tuple[Tensor, ...]:
        """Apply column-parallel layers to what ``forward`` returns; see `project_together`."""
        return project_together(hidden, layers, with_bias=with_bias)


class LowRankAdapter(nn.Module):
    """Trained addition ``scale * B A`` to the weight of a linear layer.

    It is the layer's submodule ``lora``.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.

    Args:
        in_features: of the layer.
        out_features: of the layer.
        rank: rows of A and columns of B.
        scale: factor of the product.

    Attributes:
        copy: applied to the factor that all tensor-parallel ranks have whole, A of a
            column-parallel layer and B of a row-parallel one, so that its gradient is summed over
            them; set by ``distributed.parallelize``.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.A = nn.Parameter(torch.empty(rank, in_features))
        self.B = nn.Parameter(torch.empty(out_features, rank))
        self.copy: Callable[[Tensor], Tensor] = _unchanged

    def forward(self, x: Tensor) -> Tensor:
        """Return what a row-parallel layer adds to its output, ``[..., in] -> [..., out]``."""
        return F.linear(F.linear(x, self.A), self.copy(self.B)) * self.scale


def _unchanged(factor: Tensor) -> Tensor:
    return factor


def adapter_of(layer: nn.Module) -> LowRankAdapter | None:
    """Return the low-rank adapter of a linear layer; None: it has none."""
    # Unlike getattr without an exception, which costs time.
    return cast("LowRankAdapter | None", layer._modules.get("lora"))


class RowParallelLinear(nn.Linear):
    """Output projection of a block.

    Args:
        in_features: of all ranks.
        out_features: of all ranks.
        per_token: as in the block's `ColumnParallelInput`.
    """

    def __init__(self, in_features: int, out_features: int, *, per_token: bool = False) -> None:
        super().__init__(in_features, out_features)
        self.per_token = per_token

    def forward(self, input: Tensor, is_sequence: bool) -> Tensor:  # type: ignore[override]
        """Return ``[B, R, D]`` for the local tokens."""
        adapter = adapter_of(self)
        # First: selective recomputation stops before the product that is saved last.
        added = None if adapter is None else adapter(input)
        out = F.linear(input, self.weight, self.bias)
        return out if added is None else out + added


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        # Normal values on the meta device would import the compiler, which takes seconds.
        if not self.weight.is_meta:
            super().reset_parameters()


class VocabParallelEmbedding(_Embedding):
    """Token embedding, with one row per piece of the vocabulary."""


class ReplicatedEmbedding(_Embedding):
    """Embedding whose table all ranks have, such as that of absolute positions."""

    def forward(self, input: Tensor, is_sequence: bool) -> Tensor:  # type: ignore[override]
        """Return ``[B, R, D]`` for the numbers ``[B, R]`` of the local tokens."""
        return F.embedding(input, self.weight)


class LayerNorm(nn.LayerNorm):
    """LayerNorm of the residual stream."""

    def forward(self, input: Tensor | PendingResidual, is_sequence: bool) -> Tensor:  # type: ignore[override]
        """Normalise ``[B, R, D]`` over D."""
        return layer_norm(input, self.weight, self.bias, self.eps)


class InputExchange(NamedTuple):
    """Communication of the input of column-parallel layers.

    Attributes:
        gather: returns the input of all layers, in forward.
        start_reduction: starts to reduce the gradient of what ``gather`` returned, in backward,
            and returns a function that waits for the gradient of the input. It may overwrite its
            argument.
        sequence_first: ``gather`` returns ``[N, B, D]``; outputs are views of such tensors.
    """

    gather: Callable[[Tensor], Tensor]
    start_reduction: Callable[[Tensor], Callable[[], Tensor]]
    sequence_first: bool = False


def project_together(
    x: Tensor,
    layers: Sequence[nn.Linear],
    *,
    with_bias: bool = True,
    exchange: InputExchange | None = None,
) -> tuple[Tensor, ...]:
    """Apply several linear layers to ``x`` with one matrix product.

    Args:
        x: ``[..., D]``.
        layers: layers with D input features, with or without bias.
        with_bias: False: leave out the biases.
        exchange: communication of ``x`` over tensor-parallel ranks; None: none.

    Returns:
        One tensor per layer, ``[..., out_features]``, views of one product.
    """
    adapters = [adapter_of(layer) for layer in layers]
    has_adapter = any(adapter is not None for adapter in adapters)
    if exchange is None and len(layers) == 1 and not has_adapter:
        layer = layers[0]
        return (layer(x) if with_bias else F.linear(x, layer.weight),)
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases = [cast("Tensor | None", layer.bias) if with_bias else None for layer in layers]
    # The adapters' first factors are layers of the same input.
    weights += [adapter.copy(adapter.A) for adapter in adapters if adapter is not None]
    biases += [None] * (len(weights) - len(layers))
    outputs = cast("tuple[Tensor, ...]", _ProjectTogether.apply(x, exchange, *weights, *biases))
    if not has_adapter:
        return outputs
    narrow = iter(outputs[len(layers) :])
    return tuple(
        out if adapter is None else out + F.linear(next(narrow), adapter.B) * adapter.scale
        for out, adapter in zip(outputs, adapters, strict=False)
    )


class _ProjectTogether(torch.autograd.Function):
    """y_i = x W_i^T + b_i, as one product with the concatenated W_i."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exchange: InputExchange | None, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights = [cast(Tensor, weight) for weight in parameters[: len(parameters) // 2]]
        biases = parameters[len(weights) :]
        ctx.exchange = exchange
        if exchange is not None:
            x = exchange.gather(x)
        ctx.save_for_backward(x, *weights)
        ctx.widths = [len(weight) for weight in weights]
        ctx.has_bias = [bias is not None for bias in biases]
        bias = None
        if any(ctx.has_bias):
            pairs = zip(biases, weights, strict=True)
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for b, w in pairs])
        out = F.linear(x, _joined(weights), bias)
        ctx.sequence_first = exchange is not None and exchange.sequence_first
        if ctx.sequence_first:
            out = out.transpose(0, 1)
        return tuple(out.split(ctx.widths, dim=-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        if ctx.sequence_first:
            grads = tuple(grad.transpose(0, 1) for grad in grads)
        d_out = _side_by_side(grads).flatten(0, -2)
        d_x = (d_out @ _joined(weights)).view(x.shape) if ctx.needs_input_grad[0] else None
        exchanges = ctx.exchange is not None and d_x is not None
        wait = ctx.exchange.start_reduction(d_x) if exchanges else None
        d_weights: list[Tensor | None] = [None] * len(weights)
        trained = [n for n in range(len(weights)) if ctx.needs_input_grad[2 + n]]
        if trained:
            d_part = d_out
            if len(trained) < len(weights):
                d_part = _side_by_side([grads[n] for n in trained]).flatten(0, -2)
            products = (d_part.t() @ x.flatten(0, -2)).split([ctx.widths[n] for n in trained])
            for number, product in zip(trained, products, strict=True):
                d_weights[number] = product
        d_biases: Sequence[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2 + len(weights) :]):
            d_biases = d_out.sum(0).split(ctx.widths)
        kept = [d if has else None for d, has in zip(d_biases, ctx.has_bias, strict=True)]
        if wait is not None:
            d_x = wait()
        return (d_x, None, *d_weights, *kept)


def _joined(weights: Sequence[Tensor]) -> Tensor:
    """Concatenate weights; a single one is not copied."""
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the last dimension; a view if they stand so in one buffer.

    The attention kernels write the gradients of queries, keys and values to one.
    """
    first, width = parts[0], sum(part.size(-1) for part in parts)
    place, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for part in parts:
        is_next = (
            part.storage_offset() == place
            and part.untyped_storage().data_ptr() == storage
            and part.stride() == first.stride()
            and part.shape[:-1] == first.shape[:-1]
        )
        if not is_next:
            return torch.cat(list(parts), dim=-1)
        place += part.size(-1)
    if first.stride(-1) != 1 or first.stride(-2) < width:
        return torch.cat(list(parts), dim=-1)
    return first.as_strided((*first.shape[:-1], width), first.stride())

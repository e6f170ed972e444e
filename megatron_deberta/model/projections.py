"""Fused projections: several linear layers of the same input in one matrix product.

The weights remain separate parameters under canonical names. They are concatenated for the product
in forward and again in backward; the concatenated copy is not saved. With tensor parallelism the
layers are column-parallel, and the reduction of the input's gradient over ranks runs while the
gradients of the weights are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


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
    if exchange is None and len(layers) == 1:
        layer = layers[0]
        return (layer(x) if with_bias else nn.functional.linear(x, layer.weight),)
    weights = [layer.weight for layer in layers]
    biases = [cast("Tensor | None", layer.bias) if with_bias else None for layer in layers]
    return cast("tuple[Tensor, ...]", _ProjectTogether.apply(x, exchange, *weights, *biases))


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
        out = nn.functional.linear(x, _joined(weights), bias)
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
        d_weights: Sequence[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2 : 2 + len(weights)]):
            d_weights = (d_out.t() @ x.flatten(0, -2)).split(ctx.widths)
        d_biases = d_out.sum(0).split(ctx.widths) if any(ctx.has_bias) else [None] * len(weights)
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

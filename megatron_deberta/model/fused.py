"""Fused dropout + residual + LayerNorm and bias + GELU (``parallel.fuse``).

They run in the Triton kernels of ``ops.triton.layer_norm`` and ``ops.triton.gelu`` where those are
supported. Elsewhere the functions here are compiled with torch.compile for static shapes. The
unfused equivalents are `Dropout`, `F.layer_norm` and `F.gelu`.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megatron_deberta.ops.dropout_bits import keep_mask, keep_scale
from megatron_deberta.ops.triton import MAX_FEATURES, runs_kernels

logger = logging.getLogger(__name__)

# Sets of shapes that a function is compiled for; others run uncompiled
MAX_COMPILED = 64
_numbers: defaultdict[Callable[..., Any], Iterator[int]] = defaultdict(lambda: count(1))


class PendingResidual(NamedTuple):
    """Operands of residual + dropout(x), which the fused LayerNorm computes.

    Attributes:
        x: ``[B, R, D]``.
        residual: ``[B, R, D]``.
        seed: int64 ``[B]`` dropout seeds.
        positions: ``[B, R]``, part of the dropout key.
    """

    x: Tensor
    residual: Tensor
    seed: Tensor
    positions: Tensor
    probability: float


def layer_norm(value: Tensor | PendingResidual, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Apply LayerNorm over the last dimension to a tensor or to a `PendingResidual`.

    Args:
        value: ``[B, R, D]``, or the operands of such a sum.
        weight: ``[D]``.
        bias: ``[D]``.
        eps: added to the variance.

    Returns:
        ``[B, R, D]``.
    """
    if isinstance(value, PendingResidual):
        return cast(Tensor, _DropAddNorm.apply(*value, weight, bias, eps))
    return F.layer_norm(value, weight.shape, weight, bias, eps)


def bias_gelu(product: Tensor, bias: Tensor) -> Tensor:
    """Apply erf GELU to ``product + bias``; backward computes both gradients in one pass.

    Args:
        product: ``[..., D]``.
        bias: ``[D]``.
    """
    return cast(Tensor, _BiasGelu.apply(product, bias))


class _DropAddNorm(torch.autograd.Function):
    """y = LayerNorm(residual + scale * mask * x); saves the sum and recomputes the mask."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        seed: Tensor,
        positions: Tensor,
        probability: float,
        weight: Tensor,
        bias: Tensor,
        eps: float,
    ) -> Tensor:
        run, _ = _drop_add_norm_of(x)
        y, total, mean, rstd = run(x, residual, seed, positions, probability, weight, bias, eps)
        ctx.save_for_backward(total, mean, rstd, seed, positions, weight)
        ctx.probability = probability
        return cast(Tensor, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, run = _drop_add_norm_of(grad)
        d_x, d_residual, d_weight, d_bias = run(grad, *ctx.saved_tensors, ctx.probability)
        return d_x, d_residual, None, None, None, d_weight, d_bias, None


def _drop_add_norm_of(x: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and backward functions: Triton kernels where supported, else compiled."""
    if runs_kernels(x) and x.size(-1) <= MAX_FEATURES:
        from megatron_deberta.ops.triton import layer_norm as kernels

        return kernels.forward, kernels.backward
    return compiled(drop_add_norm), compiled(drop_add_norm_backward)


class _BiasGelu(torch.autograd.Function):
    """y = gelu(product + bias)."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(product, bias)
        run, _ = _bias_gelu_of(product)
        return cast(Tensor, run(product, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _, run = _bias_gelu_of(grad)
        return cast("tuple[Tensor, Tensor]", run(grad, *ctx.saved_tensors))


def _bias_gelu_of(x: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and backward functions: Triton kernels where supported, else compiled."""
    if runs_kernels(x):
        from megatron_deberta.ops.triton import gelu as kernels

        return kernels.forward, kernels.backward
    return compiled(_bias_gelu), compiled(_bias_gelu_backward)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` compiled by torch.compile at first use, once for each set of shapes.

    Args:
        function: takes positional tensors and numbers; the numbers are constants of a model.
    """
    if torch.are_deterministic_algorithms_enabled():
        # Sets the compiler's mode too, which ``train.setup.set_determinism`` does not.
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=warn_only)

    def run(*arguments: Any) -> Any:
        shapes = (x.shape if isinstance(x, Tensor) else None for x in arguments)
        return _compiled(function, tuple(shapes))(*arguments)

    return run


@cache
def _compiled(
    function: Callable[..., Any], shapes: tuple[torch.Size | None, ...]
) -> Callable[..., Any]:
    """Return a copy of ``function`` compiled for some shapes.

    Dynamo counts compilations by code object and gives up after eight, so each set of shapes has a
    code object of its own.
    """
    number = next(_numbers[function])
    if number > MAX_COMPILED:
        if number == MAX_COMPILED + 1:
            logger.warning("%s: not compiled for more than %d shapes", function, MAX_COMPILED)
        return function
    assert isinstance(function, FunctionType)
    code = function.__code__
    name = f"{code.co_name}_{number}"
    copy = FunctionType(code.replace(co_name=name), function.__globals__, name)
    return torch.compile(copy, dynamic=False)


def _accurate(x: Tensor) -> Tensor:
    """Convert to at least fp32, as torch's LayerNorm and GELU do."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def drop_add_norm(
    x: Tensor,
    residual: Tensor,
    seed: Tensor,
    positions: Tensor,
    probability: float,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute LayerNorm(residual + dropout(x)).

    Args:
        x: ``[B, R, D]``.
        residual: like ``x``.
        seed: int64 ``[B]`` dropout seeds.
        positions: int64 ``[B, R]``.
        probability: of dropout.
        weight: ``[D]``.
        bias: ``[D]``.
        eps: added to the variance.

    Returns:
        The normalised rows and the sum, ``[B, R, D]``; mean and reciprocal standard deviation of
        the sum, ``[B, R, 1]`` in at least fp32.
    """
    keep = keep_mask(seed, positions, x.size(-1), probability).view(x.shape)
    total = residual + x.masked_fill(~keep, 0.0) * keep_scale(probability)
    wide = _accurate(total)
    variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    y = (wide - mean) * rstd * weight + bias
    return y.to(x.dtype), total, mean, rstd


def drop_add_norm_backward(
    grad: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor,
    positions: Tensor,
    weight: Tensor,
    probability: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of `drop_add_norm`.

    Args:
        grad: gradient of the normalised rows, ``[B, R, D]``.
        total: the sum, as `drop_add_norm` returned it.
        mean: likewise.
        rstd: likewise.
        seed: as in `drop_add_norm`.
        positions: likewise.
        weight: likewise.
        probability: likewise.

    Returns:
        Gradients of x and residual, ``[B, R, D]``, and of weight and bias, ``[D]``.
    """
    wide = _accurate(grad)
    normalised = (_accurate(total) - mean) * rstd
    scaled = wide * weight
    inward = normalised * (scaled * normalised).mean(-1, keepdim=True)
    d_total = (rstd * (scaled - scaled.mean(-1, keepdim=True) - inward)).to(grad.dtype)
    keep = keep_mask(seed, positions, grad.size(-1), probability).view(grad.shape)
    d_x = d_total.masked_fill(~keep, 0.0) * keep_scale(probability)
    d_weight = (wide * normalised).flatten(0, -2).sum(0).to(weight.dtype)
    d_bias = wide.flatten(0, -2).sum(0).to(weight.dtype)
    return d_x, d_total, d_weight, d_bias


def _bias_gelu(product: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(product + bias)


def _bias_gelu_backward(grad: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    x = _accurate(product + bias)
    below = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    slope = below + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    d_x = _accurate(grad) * slope
    return d_x.to(product.dtype), d_x.flatten(0, -2).sum(0).to(bias.dtype)

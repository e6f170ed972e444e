"""Dropout + residual + LayerNorm: y = LayerNorm(residual + scale * mask * x), and its gradients.

Forward reads x and the residual once and writes y and the sum; backward reads the output's gradient
and the sum once and writes both gradients. The dropout bits are computed again in backward. A
program sums the gradients of weight and bias over its rows, and a second kernel sums the programs'
results in a fixed order, without atomics. Twins: ``model.fused.drop_add_norm`` and
``drop_add_norm_backward``.

Features are in groups of four, which share one word of the dropout hash.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_deberta.ops.dropout_bits import drop_threshold, keep_scale
from megatron_deberta.ops.triton.tiles import DropoutArguments, dropout_state, mix32

MAX_PARTS = 528
"""Programs of the backward kernel: a constant, so that sums do not depend on the GPU. Four per
multiprocessor of an H100."""

SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 32, 32, 4
"""Tile and warps of the kernel that sums the programs' results."""


@triton.jit
def feature_offsets(features, GROUPS: tl.constexpr):
    """Return the features ``[GROUPS, 4]`` of a row and which of them exist."""
    feature = tl.arange(0, GROUPS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    return feature, feature < features


@triton.jit
def kept_features(POSITIONS, sample, row, batch_stride, row_stride, dropout, GROUPS: tl.constexpr):
    """Return the dropout mask of one token, ``[GROUPS, 4]``, True = keep.

    Args:
        POSITIONS: positions, int64 with these strides.
        sample: row of the batch.
        row: token in the sample.
        batch_stride: elements between samples.
        row_stride: elements between tokens.
        dropout: ``DropoutArguments``.
        GROUPS: groups of four features.
    """
    position = tl.load(POSITIONS + sample * batch_stride + row * row_stride)
    key = mix32(dropout_state(dropout, sample, sample * 0, True) ^ position.to(tl.uint32))
    word = mix32(key ^ (tl.arange(0, GROUPS).to(tl.uint32) * 0x9E3779B9))
    byte = (word[:, None] >> (8 * tl.arange(0, 4)).to(tl.uint32)[None, :]) & 255
    return byte >= tl.cast(dropout.threshold, tl.uint32)


@triton.jit
def sum_all(x):
    """Sum all elements of a matrix."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def drop_add_norm_kernel(
    X, RESIDUAL, POSITIONS, WEIGHT, BIAS, OUT, TOTAL, MEAN, RSTD, DROPOUT,
    tokens, features, batch_stride, row_stride, eps, GROUPS: tl.constexpr,
):  # fmt: skip
    """Normalise one token.

    Args:
        X: ``[samples, tokens, features]``, contiguous.
        RESIDUAL: like X.
        POSITIONS: int64 ``[samples, tokens]`` with these strides.
        WEIGHT: ``[features]``.
        BIAS: ``[features]``.
        OUT: like X.
        TOTAL: sum that is normalised, like X.
        MEAN: float32 ``[samples * tokens]``.
        RSTD: reciprocal standard deviation, like MEAN.
        DROPOUT: ``DropoutArguments``.
        tokens: tokens per sample.
        features: features per token.
        batch_stride: elements of POSITIONS between samples.
        row_stride: elements of POSITIONS between tokens.
        eps: added to the variance.
        GROUPS: groups of four features, rounded up to a power of two.
    """
    index = tl.program_id(0).to(tl.int64)
    feature, exists = feature_offsets(features, GROUPS)
    at = index * features + feature
    x = tl.load(X + at, mask=exists, other=0.0).to(tl.float32)
    residual = tl.load(RESIDUAL + at, mask=exists, other=0.0).to(tl.float32)
    keep = kept_features(
        POSITIONS, index // tokens, index % tokens, batch_stride, row_stride, DROPOUT, GROUPS
    )
    # Rounded as backward will read it.
    total = (residual + tl.where(keep, x * DROPOUT.keep_scale, 0.0)).to(TOTAL.dtype.element_ty)
    tl.store(TOTAL + at, total, mask=exists)
    total = total.to(tl.float32)
    mean = sum_all(total) / features
    centred = tl.where(exists, total - mean, 0.0)
    rstd = tl.math.rsqrt(sum_all(centred * centred) / features + eps)
    weight = tl.load(WEIGHT + feature, mask=exists, other=0.0).to(tl.float32)
    bias = tl.load(BIAS + feature, mask=exists, other=0.0).to(tl.float32)
    y = centred * rstd * weight + bias
    tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=exists)
    tl.store(MEAN + index, mean)
    tl.store(RSTD + index, rstd)


@triton.jit
def drop_add_norm_backward_kernel(
    GRAD, TOTAL, MEAN, RSTD, POSITIONS, WEIGHT, D_X, D_RESIDUAL, PARTS, DROPOUT,
    rows, rows_per_program, tokens, features, batch_stride, row_stride, GROUPS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of x and residual of some tokens, and their sums for weight and bias.

    Arguments as in ``drop_add_norm_kernel``, and: GRAD, D_X and D_RESIDUAL, like X; PARTS, float32
    ``[programs, 2, features]``, the sums for weight and bias; rows, the number of all tokens;
    rows_per_program, the tokens per program.
    """
    program = tl.program_id(0)
    feature, exists = feature_offsets(features, GROUPS)
    weight = tl.load(WEIGHT + feature, mask=exists, other=0.0).to(tl.float32)
    d_weight = tl.zeros([GROUPS, 4], tl.float32)
    d_bias = tl.zeros([GROUPS, 4], tl.float32)
    first = program * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, rows)):
        index = tl.cast(row, tl.int64)
        at = index * features + feature
        grad = tl.load(GRAD + at, mask=exists, other=0.0).to(tl.float32)
        total = tl.load(TOTAL + at, mask=exists, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + index)
        normalised = tl.where(exists, (total - tl.load(MEAN + index)) * rstd, 0.0)
        scaled = grad * weight
        d_weight += grad * normalised
        d_bias += grad
        inward = normalised * (sum_all(scaled * normalised) / features)
        d_total = rstd * (scaled - sum_all(scaled) / features - inward)
        keep = kept_features(
            POSITIONS, index // tokens, index % tokens, batch_stride, row_stride, DROPOUT, GROUPS
        )
        d_x = tl.where(keep, d_total * DROPOUT.keep_scale, 0.0)
        tl.store(D_RESIDUAL + at, d_total.to(D_RESIDUAL.dtype.element_ty), mask=exists)
        tl.store(D_X + at, d_x.to(D_X.dtype.element_ty), mask=exists)
    part = PARTS + program * 2 * features + feature
    tl.store(part, d_weight, mask=exists)
    tl.store(part + features, d_bias, mask=exists)


@triton.jit
def layer_norm_sum_kernel(
    PARTS, D_PARAMETERS, parts, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sum a matrix over its rows, in a fixed order.

    Args:
        PARTS: float32 ``[parts, columns]``.
        D_PARAMETERS: ``[columns]``.
        parts: number of rows.
        columns: number of columns.
        ROWS: rows added at once.
        COLUMNS: columns per program.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, parts, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < parts)[:, None] & (column < columns)[None, :]
        total += tl.load(PARTS + row[:, None] * columns + column[None, :], mask=mask, other=0.0)
    out = tl.sum(total, 0).to(D_PARAMETERS.dtype.element_ty)
    tl.store(D_PARAMETERS + column, out, mask=column < columns)


def num_groups(features: int) -> int:
    """Return the groups of four features of a program, a power of two."""
    return int(max(32, triton.next_power_of_2(-(-features // 4))))


def num_warps(groups: int) -> int:
    """Return the warps of a program: eight features per thread, sixteen for long rows."""
    return min(max(groups // 64, 1), 16)


def forward(
    x: Tensor,
    residual: Tensor,
    seed: Tensor,
    positions: Tensor,
    probability: float,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what ``model.fused.drop_add_norm`` computes.

    Args:
        x: ``[B, R, D]`` fp16, bf16 or fp32.
        residual: like ``x``.
        seed: int64 ``[B]``.
        positions: int64 ``[B, R]``.
        probability: of dropout.
        weight: ``[D]``.
        bias: ``[D]``.
        eps: added to the variance.

    Returns:
        The normalised rows and their input, like ``x``; mean and reciprocal standard deviation,
        fp32 ``[B, R, 1]``.
    """
    x, residual = x.contiguous(), residual.contiguous()
    batch, tokens, features = x.shape
    y, total = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = x.new_empty((2, batch, tokens, 1), dtype=torch.float32).unbind()
    if x.numel() == 0:
        return y, total, mean, rstd
    groups = num_groups(features)
    with torch.cuda.device_of(x):
        drop_add_norm_kernel[(batch * tokens,)](
            x, residual, positions, weight, bias, y, total, mean, rstd,
            _dropout(seed, probability), tokens, features, *positions.stride(), eps,
            GROUPS=groups, num_warps=num_warps(groups),
        )  # fmt: skip
    return y, total, mean, rstd


def backward(
    grad: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor,
    positions: Tensor,
    weight: Tensor,
    probability: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, residual, weight and bias; arguments as in `forward`."""
    grad = grad.contiguous()
    batch, tokens, features = grad.shape
    d_x, d_residual = torch.empty_like(grad), torch.empty_like(grad)
    d_parameters = weight.new_empty((2, features))
    rows = batch * tokens
    if rows == 0:
        d_parameters.zero_()
        return d_x, d_residual, d_parameters[0], d_parameters[1]
    per_program = -(-rows // MAX_PARTS)
    num_parts, groups = -(-rows // per_program), num_groups(features)
    parts = grad.new_empty((num_parts, 2 * features), dtype=torch.float32)
    with torch.cuda.device_of(grad):
        drop_add_norm_backward_kernel[(num_parts,)](
            grad, total, mean, rstd, positions, weight, d_x, d_residual, parts,
            _dropout(seed, probability), rows, per_program, tokens, features,
            *positions.stride(), GROUPS=groups, num_warps=num_warps(groups),
        )  # fmt: skip
        sum_parts(parts, d_parameters)
    return d_x, d_residual, d_parameters[0], d_parameters[1]


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """Sum a matrix over its rows, in a fixed order.

    Args:
        parts: fp32 ``[programs, columns]``.
        out: of ``columns`` elements, contiguous.
    """
    num_parts, columns = parts.shape
    layer_norm_sum_kernel[(triton.cdiv(columns, SUM_COLUMNS),)](
        parts, out, num_parts, columns, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=SUM_WARPS
    )


def _dropout(seed: Tensor, probability: float) -> DropoutArguments:
    return DropoutArguments(seed, drop_threshold(probability), keep_scale(probability), 0)

"""Bias + GELU and its gradients.

Backward reads the output's gradient and the product once and writes the product's gradient; a
program also sums it over its rows for the bias, and ``layer_norm_sum_kernel`` adds up the programs'
results in a fixed order. Compiled by torch, the two gradients are two kernels that both read and
compute everything. Twins: ``model.fused._bias_gelu`` and ``_bias_gelu_backward``.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_deberta.ops.triton.layer_norm import sum_parts

ROWS, COLUMNS, WARPS = 4, 1024, 8
"""Tile of a program, and its warps: 16 elements per thread."""

MAX_PARTS = 176
"""Programs of the backward kernel for the same columns: a constant, so that sums do not depend on
the GPU. Eight per multiprocessor of an H100 for the 6,144 columns of the 1.5B model."""

ROOT_HALF = tl.constexpr(math.sqrt(0.5))
DENSITY = tl.constexpr(1 / math.sqrt(2 * math.pi))


@triton.jit
def bias_gelu_kernel(PRODUCT, BIAS, OUT, rows, features, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute GELU(product + bias) for one tile.

    Args:
        PRODUCT: ``[rows, features]``, contiguous.
        BIAS: ``[features]``.
        OUT: like PRODUCT.
        rows: number of rows.
        features: number of columns.
        ROWS: rows of the tile.
        COLUMNS: columns of the tile.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.load(BIAS + column, mask=column < features, other=0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * features + column[None, :]
    exists = (row < rows)[:, None] & (column < features)[None, :]
    x = tl.load(PRODUCT + at, mask=exists, other=0.0).to(tl.float32) + bias[None, :]
    y = x * (0.5 * (1.0 + tl.erf(x * ROOT_HALF)))
    tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=exists)


@triton.jit
def bias_gelu_backward_kernel(
    GRAD, PRODUCT, BIAS, D_PRODUCT, PARTS, rows, rows_per_program, features,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the product's gradient in some rows and columns, and its sum over these rows.

    Arguments as in ``bias_gelu_kernel``, and: GRAD and D_PRODUCT, like PRODUCT; PARTS, float32
    ``[programs, features]``; rows_per_program, a multiple of ROWS.
    """
    part = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.load(BIAS + column, mask=column < features, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    begin = part * rows_per_program
    for first in range(begin, tl.minimum(begin + rows_per_program, rows), ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * features + column[None, :]
        exists = (row < rows)[:, None] & (column < features)[None, :]
        x = tl.load(PRODUCT + at, mask=exists, other=0.0).to(tl.float32) + bias[None, :]
        grad = tl.load(GRAD + at, mask=exists, other=0.0).to(tl.float32)
        below = 0.5 * (1.0 + tl.erf(x * ROOT_HALF))
        d_x = grad * (below + x * (DENSITY * tl.exp(-0.5 * x * x)))
        tl.store(D_PRODUCT + at, d_x.to(D_PRODUCT.dtype.element_ty), mask=exists)
        sums += d_x
    tl.store(PARTS + part * features + column, tl.sum(sums, 0), mask=column < features)


def forward(product: Tensor, bias: Tensor) -> Tensor:
    """Compute what ``model.fused._bias_gelu`` computes.

    Args:
        product: ``[..., D]`` fp16, bf16 or fp32.
        bias: ``[D]``.

    Returns:
        Like ``product``, contiguous.
    """
    product, bias = product.contiguous(), bias.contiguous()
    out = torch.empty_like(product)
    if product.numel() == 0:
        return out
    features = product.size(-1)
    rows = product.numel() // features
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(features, COLUMNS))
    with torch.cuda.device_of(product):
        bias_gelu_kernel[grid](
            product, bias, out, rows, features, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
        )
    return out


def backward(grad: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of product and bias.

    Args:
        grad: gradient of the result of `forward`, ``[..., D]``.
        product: as in `forward`.
        bias: as in `forward`.
    """
    grad, product, bias = grad.contiguous(), product.contiguous(), bias.contiguous()
    d_product, d_bias = torch.empty_like(product), torch.empty_like(bias)
    if product.numel() == 0:
        return d_product, d_bias.zero_()
    features = product.size(-1)
    rows = product.numel() // features
    per_program = -(-rows // (MAX_PARTS * ROWS)) * ROWS
    num_parts = -(-rows // per_program)
    parts = product.new_empty((num_parts, features), dtype=torch.float32)
    with torch.cuda.device_of(product):
        bias_gelu_backward_kernel[num_parts, triton.cdiv(features, COLUMNS)](
            grad, product, bias, d_product, parts, rows, per_program, features,
            ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        sum_parts(parts, d_bias)
    return d_product, d_bias

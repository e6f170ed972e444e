"""Cross-entropy over a rank's columns of the logits: online softmax and gradient, in two kernels.

The first reads the logits once and returns, for each row, maximum, sum of exponentials, the label's
logit and whether the label is the first maximum; ranks combine these four numbers. The second
overwrites the logits with their gradients and adds the gradient of the bias. Together they move
three times the logits' bytes. No atomics. Twin: ``ops.cross_entropy._chunk``.

Liger Kernel (Hsu et al. 2024, arXiv:2410.10989) reads the row again in the same program instead.
That leaves no point between sum and gradient at which tensor-parallel ranks could combine their
sums, and the gradient of the bias takes another pass, of rounded numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096
"""Columns that a program of the first kernel reads at a time."""
GRADIENT_TILE = (32, 128)
"""Rows and columns that a program of the second kernel reads at a time."""
WARPS = {"cross_entropy_statistics": 8, "cross_entropy_gradient": 4}

_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def cross_entropy_statistics_kernel(
    LOGITS, LABELS, STATISTICS, rows, stride, columns, start, COLUMNS: tl.constexpr
):
    """Compute the statistics of one row.

    Args:
        LOGITS: ``[rows, stride]``.
        LABELS: int64 ``[rows]``.
        STATISTICS: fp32 ``[4, rows]``.
        rows: number of rows.
        stride: elements of a row, padding included.
        columns: elements that are not padding.
        start: vocabulary index of the first column.
        COLUMNS: columns per iteration.
    """
    row = tl.program_id(0)
    logits = LOGITS + tl.cast(row, tl.int64) * stride
    label = tl.load(LABELS + row) - start
    is_here = (label >= 0) & (label < columns)
    own = tl.where(is_here, label, -1).to(tl.int32)
    target = tl.load(logits + own, mask=is_here, other=0.0).to(tl.float32)
    # Each lane has a maximum and a sum of its own, so that the loop contains no reduction.
    maximum = tl.full([COLUMNS], _LOWEST, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    beaten = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        # The mask of the load is the stride's, whose divisor is known: it stays a wide load.
        z = tl.load(logits + column, mask=column < stride, other=0.0).to(tl.float32)
        z = tl.where(column < columns, z, float("-inf"))
        ratio = tl.exp(-tl.abs(z - maximum))
        total = tl.where(z > maximum, total * ratio + 1.0, total + ratio)
        maximum = tl.where(z > maximum, z, maximum)
        beaten |= ((z > target) | ((z == target) & (column < own))).to(tl.int32)
    top = tl.max(maximum, 0)
    hit = is_here & (tl.max(beaten, 0) == 0)
    tl.store(STATISTICS + row, top)
    tl.store(STATISTICS + rows + row, tl.sum(total * tl.exp(maximum - top), 0))
    tl.store(STATISTICS + 2 * rows + row, target)
    tl.store(STATISTICS + 3 * rows + row, hit.to(tl.float32))


@triton.jit
def cross_entropy_gradient_kernel(
    LOGITS, LABELS, TOP, SUM, D_BIAS, rows, stride, columns, start, ignored, factor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Overwrite some columns of the logits with their gradients.

    Args:
        LOGITS: ``[rows, stride]``.
        LABELS: int64 ``[rows]``.
        TOP: maximum of each row over all ranks, fp32 ``[rows]``.
        SUM: sum of exponentials over all ranks, fp32 ``[rows]``.
        D_BIAS: fp32 ``[stride]``, to which the gradient of the bias is added.
        rows: number of rows.
        stride: elements of a row, padding included; the gradient of padding is 0.
        columns: elements that are not padding.
        start: vocabulary index of the first column.
        ignored: label of a row without a loss.
        factor: on the gradients of the logits, not on that of the bias.
        ROWS: rows per iteration.
        COLUMNS: columns of the program.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    d_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        label = tl.load(LABELS + row, mask=row < rows, other=ignored)
        top = tl.load(TOP + row, mask=row < rows, other=0.0)
        total = tl.load(SUM + row, mask=row < rows, other=1.0)
        scale = tl.where(label == ignored, 0.0, 1.0 / total)
        pointers = LOGITS + row.to(tl.int64)[:, None] * stride + column[None, :]
        mask = (row < rows)[:, None] & (column < stride)[None, :]
        z = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        is_label = column[None, :] == (label - start).to(tl.int32)[:, None]
        d_z = tl.exp(z - top[:, None]) * scale[:, None] - is_label.to(tl.float32)
        d_z = tl.where((column < columns)[None, :], d_z, 0.0)
        d_bias += d_z
        tl.store(pointers, (d_z * factor).to(LOGITS.dtype.element_ty), mask=mask)
    sums = tl.load(D_BIAS + column, mask=column < stride, other=0.0) + tl.sum(d_bias, 0)
    tl.store(D_BIAS + column, sums, mask=column < stride)


def row_statistics(logits: Tensor, labels: Tensor, start: int, columns: int) -> Tensor:
    """Return the statistics of each row that all ranks combine.

    Args:
        logits: ``[R, C]``, contiguous, fp16, bf16 or fp32.
        labels: int64 ``[R]``, in the whole vocabulary.
        start: vocabulary index of the first column.
        columns: columns that are not padding.

    Returns:
        fp32 ``[4, R]``: maximum (the lowest fp32 number without columns), sum of the exponentials
        of the differences from it, the label's logit (0 if it is elsewhere), and 1 if the label is
        the first maximum.
    """
    rows, stride = logits.shape
    statistics = logits.new_empty((4, rows), dtype=torch.float32)
    with torch.cuda.device_of(logits):
        cross_entropy_statistics_kernel[(rows,)](
            logits, labels, statistics, rows, stride, columns, start,
            COLUMNS=COLUMNS, num_warps=WARPS["cross_entropy_statistics"],
        )  # fmt: skip
    return statistics


def write_gradient_(
    logits: Tensor,
    labels: Tensor,
    top: Tensor,
    total: Tensor,
    d_bias: Tensor,
    start: int,
    columns: int,
    ignored: int,
    factor: float,
) -> None:
    """Overwrite the logits with ``factor`` times their gradients and add the bias's gradient.

    Args:
        logits: as in `row_statistics`.
        labels: as in `row_statistics`.
        top: maximum of each row over all ranks, fp32 ``[R]``.
        total: sum of the exponentials of the differences from it, fp32 ``[R]``.
        d_bias: fp32 ``[C]``.
        start: vocabulary index of the first column.
        columns: columns that are not padding.
        ignored: label of a row without a loss.
        factor: see above.
    """
    rows, stride = logits.shape
    tile_rows, tile_columns = GRADIENT_TILE
    with torch.cuda.device_of(logits):
        cross_entropy_gradient_kernel[(triton.cdiv(stride, tile_columns),)](
            logits, labels, top, total, d_bias, rows, stride, columns, start, ignored, factor,
            ROWS=tile_rows, COLUMNS=tile_columns, num_warps=WARPS["cross_entropy_gradient"],
        )  # fmt: skip

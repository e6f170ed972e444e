"""Dropout of hidden states by a compiled CPU kernel: one pass, and no mask in memory."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from megatron_deberta.ops.dropout_bits import drop_threshold, keep_scale, row_keys
from megatron_deberta.ops.native.build import library


def can_drop(x: Tensor) -> bool:
    """Return whether the kernel supports a tensor: a float32 CPU tensor, not traced or fake.

    Args:
        x: any shape.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.compiler.is_compiling():
        return False
    return type(x) in (Tensor, nn.Parameter) and library() is not None


def drop(
    x: Tensor, residual: Tensor | None, seed: Tensor, positions: Tensor, probability: float
) -> Tensor:
    """Return ``residual + scale * mask * x``; bits as in `megatron_deberta.ops.dropout_bits`.

    Args:
        x: float32 ``[B, R, D]`` or a table ``[S, D]``.
        residual: like ``x``, or None.
        seed: int64 ``[B]``, or ``[1]`` for a table.
        positions: ``[B, R]`` or ``[S]``.
        probability: dropout probability, rounded to a multiple of 1/256.
    """
    keys = row_keys(seed, positions, 1, 0).contiguous()
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty_like(x)
    loaded = library()
    assert loaded is not None
    loaded.dropout(
        *(ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (x, residual, out, keys)),
        ctypes.c_int64(keys.numel()),
        ctypes.c_int64(x.shape[-1]),
        ctypes.c_int32(drop_threshold(probability)),
        ctypes.c_float(keep_scale(probability)),
    )
    return out

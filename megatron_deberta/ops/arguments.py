"""Arguments of the attention operator and their validation.

Shapes, dtypes and devices are always checked. Values are checked on the CPU, and on other devices
only with ``MEGATRON_DEBERTA_CHECK=1``, because reading them synchronises with the device.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron_deberta.ops.dropout_bits import drop_threshold
from megatron_deberta.ops.relative_positions import RelativePositions

P2CIndex = Literal["released", "paper"]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """Arguments of ``disentangled_attention`` other than its five differentiable tensors."""

    positions: RelativePositions
    q_positions: Tensor | None
    key_padding: Tensor | None
    document_ids: Tensor | None
    causal: bool
    dropout_p: float
    seed: Tensor | None
    """int64 ``[batch]``; None without dropout."""
    head_offset: int
    scale: float
    p2c_index: P2CIndex
    return_lse: bool


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    """Arguments of ``disentangled_attention``, documented there."""

    q: Tensor
    k: Tensor
    v: Tensor
    pos_key: Tensor | None
    pos_query: Tensor | None
    rules: AttentionRules


def default_scale(head_dim: int, pos_key: Tensor | None, pos_query: Tensor | None) -> float:
    """Return 1 / sqrt(terms * head_dim), where terms counts content and the given position terms.

    Args:
        head_dim: features per head.
        pos_key: table of the content-to-position term or None.
        pos_query: table of the position-to-content term or None.
    """
    terms = 1 + (pos_key is not None) + (pos_query is not None)
    return 1 / math.sqrt(terms * head_dim)


def row_seeds(seed: int | Tensor | None, dropout_p: float, q: Tensor) -> Tensor | None:
    """Return one int64 seed per row; an int stands for that seed plus the row's index.

    Args:
        seed: argument of ``disentangled_attention``.
        dropout_p: dropout probability.
        q: queries ``[batch, heads, q_len, head_dim]``.

    Raises:
        ValueError: there is dropout but no seed.
    """
    if drop_threshold(dropout_p) == 0:
        return None
    if seed is None:
        raise ValueError(f"seed: got None with dropout_p {dropout_p}, expected an int or a tensor")
    if isinstance(seed, int):
        return torch.arange(seed, seed + q.shape[0], device=q.device)
    return seed


def check_arguments(a: AttentionArguments) -> None:
    """Validate the arguments of ``disentangled_attention``.

    Raises:
        ValueError: an argument is invalid; names it, its value and what was expected.
    """
    _check_heads(a)
    _check_rows(a)
    if a.rules.p2c_index not in ("released", "paper"):
        raise ValueError(f"p2c_index: got {a.rules.p2c_index!r}, expected 'released' or 'paper'")
    if a.rules.head_offset < 0:
        raise ValueError(f"head_offset: got {a.rules.head_offset}, expected at least 0")
    if a.q.device.type == "cpu" or os.environ.get("MEGATRON_DEBERTA_CHECK") == "1":
        _check_values(a)


def without_idle_masks(a: AttentionArguments) -> AttentionArguments:
    """Drop masks that hide nothing, on the CPU, where reading them needs no synchronisation.

    Args:
        a: checked arguments.
    """
    if a.q.device.type != "cpu":
        return a
    padding, documents = a.rules.key_padding, a.rules.document_ids
    if padding is not None and bool(padding.all()):
        padding = None
    if documents is not None and bool((documents == documents[:, :1]).all()):
        documents = None
    return replace(a, rules=replace(a.rules, key_padding=padding, document_ids=documents))


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Check shape and device of one tensor."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: got device {tensor.device}, expected {like.device} like q")


def _check_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        expected = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{name}: got dtype {tensor.dtype}, expected {expected}")


def _check_heads(a: AttentionArguments) -> None:
    """Check the tensors with a head dimension."""
    for name, tensor in (("q", a.q), ("k", a.k)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: got shape {list(tensor.shape)}, expected [batch, heads, len, head_dim]"
            )
    batch, heads, q_len, head_dim = a.q.shape
    k_len = a.k.shape[2]
    _check_dtype("q", a.q, _FLOATS)
    _check("k", a.k, (batch, heads, k_len, head_dim), a.q)
    _check("v", a.v, (batch, heads, k_len, head_dim), a.q)
    if a.rules.q_positions is None and q_len != k_len:
        raise ValueError(
            f"q: got {q_len} queries for {k_len} keys, expected equal lengths or q_positions"
        )
    table = (heads, 2 * a.rules.positions.span, head_dim)
    tables = [("pos_key", a.pos_key), ("pos_query", a.pos_query)]
    for name, maybe in tables:
        if maybe is not None:
            _check(name, maybe, table, a.q)
    for name, maybe in [("k", a.k), ("v", a.v), *tables]:
        if maybe is not None:
            _check_dtype(name, maybe, (a.q.dtype,))


def _check_rows(a: AttentionArguments) -> None:
    """Check the tensors with one entry per batch row."""
    batch, _, q_len, _ = a.q.shape
    k_len = a.k.shape[2]
    if a.rules.q_positions is not None:
        _check("q_positions", a.rules.q_positions, (batch, q_len), a.q)
        _check_dtype("q_positions", a.rules.q_positions, _INTEGERS)
    if a.rules.key_padding is not None:
        _check("key_padding", a.rules.key_padding, (batch, k_len), a.q)
        _check_dtype("key_padding", a.rules.key_padding, (torch.bool,))
    if a.rules.document_ids is not None:
        _check("document_ids", a.rules.document_ids, (batch, k_len), a.q)
        _check_dtype("document_ids", a.rules.document_ids, _INTEGERS)
    if a.rules.seed is not None:
        _check("seed", a.rules.seed, (batch,), a.q)
        _check_dtype("seed", a.rules.seed, (torch.int64,))


def _check_values(a: AttentionArguments) -> None:
    """Check the values of positions and masks."""
    if a.rules.q_positions is not None and a.rules.q_positions.numel():
        low, high = (int(x) for x in torch.aminmax(a.rules.q_positions))
        if low < -1 or high >= a.k.shape[2]:
            raise ValueError(
                f"q_positions: got values in [{low}, {high}], expected -1 or "
                f"[0, {a.k.shape[2]}), the positions of the keys"
            )
    if a.rules.key_padding is not None and a.rules.key_padding.shape[1]:
        edges = (a.rules.key_padding[:, 1:] != a.rules.key_padding[:, :-1]).sum(1)
        edges = edges + a.rules.key_padding[:, 0].int() + a.rules.key_padding[:, -1].int()
        if bool((edges > 2).any()):
            row = int(torch.nonzero(edges > 2)[0])
            raise ValueError(
                f"key_padding: got a gap between real keys in row {row}, expected one run of True"
            )
    if a.rules.document_ids is not None and bool((a.rules.document_ids.diff(dim=1) < 0).any()):
        row = int(torch.nonzero((a.rules.document_ids.diff(dim=1) < 0).any(1))[0])
        raise ValueError(
            f"document_ids: got decreasing ids in row {row}, expected non-decreasing ones"
        )

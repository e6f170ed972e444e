"""Arguments of the attention operator, their validation, and which keys they make visible.

Shapes, dtypes and devices are always checked. Values are checked on the CPU, and on other devices
only with ``MEGATRON_DEBERTA_CHECK=1``, because reading them synchronises with the device.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from megatron_deberta.ops.dropout_bits import drop_threshold
from megatron_deberta.ops.relative_positions import RelativePositions

P2CIndex = Literal["microsoft", "paper"]
MaskCache = dict[str, Tensor | None]
"""Results of a backend that depend on the masks and the length alone."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int16, torch.int32, torch.int64)


class AttentionArguments(NamedTuple):
    """Arguments of ``disentangled_attention``, documented there; the first five differentiable.

    Attributes:
        seed: int64 ``[batch]``; None without dropout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pos_key: Tensor | None
    pos_query: Tensor | None
    positions: RelativePositions
    q_positions: Tensor | None
    attention_mask: Tensor | None
    document_ids: Tensor | None
    causal: bool
    dropout_p: float
    seed: Tensor | None
    head_offset: int
    scale: float
    p2c_index: P2CIndex
    return_lse: bool
    masks: MaskCache | None = None
    distinct_positions: bool = False


def score_dtype(a: AttentionArguments) -> torch.dtype:
    """Return the dtype of scores and of sums of gradients where the input's may be too narrow."""
    return torch.float64 if a.q.dtype == torch.float64 else torch.float32


def default_scale(head_dim: int, pos_key: Tensor | None, pos_query: Tensor | None) -> float:
    """Return 1 / sqrt(terms * head_dim), where terms counts content and the given position terms.

    Args:
        head_dim: features per head.
        pos_key: table of the content-to-position term ``[heads, slots, head_dim]``, or None.
        pos_query: table of the position-to-content term, of the same shape, or None.
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


def current_p2c_index(name: str) -> P2CIndex:
    """Return the argument ``p2c_index``, with the old name of ``microsoft`` replaced."""
    if name == "released":
        message = "p2c_index='released' was renamed to 'microsoft'; use the new value"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        name = "microsoft"
    return cast(P2CIndex, name)


def check_arguments(a: AttentionArguments) -> None:
    """Validate the arguments of ``disentangled_attention``.

    Raises:
        ValueError: an argument is invalid; names it, its value and what was expected.
    """
    for name, tensor in (("q", a.q), ("k", a.k)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: got shape {list(tensor.shape)}, expected [batch, heads, len, head_dim]"
            )
    batch, heads, q_len, head_dim = a.q.shape
    k_len, dtype = a.k.shape[2], (a.q.dtype,)
    table = (heads, 2 * a.positions.span, head_dim)
    _check("q", a.q, (batch, heads, q_len, head_dim), _FLOATS, a.q)
    _check("k", a.k, (batch, heads, k_len, head_dim), dtype, a.q)
    _check("v", a.v, (batch, heads, k_len, head_dim), dtype, a.q)
    if a.q_positions is None and q_len != k_len:
        raise ValueError(
            f"q: got {q_len} queries for {k_len} keys, expected equal lengths or q_positions"
        )
    _check("pos_key", a.pos_key, table, dtype, a.q)
    _check("pos_query", a.pos_query, table, dtype, a.q)
    _check("q_positions", a.q_positions, (batch, q_len), _INTEGERS, a.q)
    _check("attention_mask", a.attention_mask, (batch, k_len), (torch.bool,), a.q)
    _check("document_ids", a.document_ids, (batch, k_len), _INTEGERS, a.q)
    _check("seed", a.seed, (batch,), (torch.int64,), a.q)
    if a.p2c_index not in ("microsoft", "paper"):
        raise ValueError(f"p2c_index: got {a.p2c_index!r}, expected 'microsoft' or 'paper'")
    if a.head_offset < 0:
        raise ValueError(f"head_offset: got {a.head_offset}, expected at least 0")
    if a.q.device.type == "cpu" or os.environ.get("MEGATRON_DEBERTA_CHECK") == "1":
        _check_values(a)


def without_idle_masks(a: AttentionArguments) -> AttentionArguments:
    """Drop masks that hide nothing, on the CPU, where reading them needs no synchronisation.

    Args:
        a: checked arguments.
    """
    if a.q.device.type != "cpu":
        return a
    padding, documents = a.attention_mask, a.document_ids
    if padding is not None and bool(padding.all()):
        padding = None
    if documents is not None and bool((documents == documents[:, :1]).all()):
        documents = None
    return a._replace(attention_mask=padding, document_ids=documents)


def _check(
    name: str,
    tensor: Tensor | None,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    like: Tensor,
) -> None:
    """Check shape, device and dtype of one tensor, if it is given."""
    if tensor is None:
        return
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: got device {tensor.device}, expected {like.device} like q")
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise ValueError(f"{name}: got dtype {tensor.dtype}, expected {expected}")


def _check_values(a: AttentionArguments) -> None:
    """Check the values of positions and masks."""
    positions, padding, documents = a.q_positions, a.attention_mask, a.document_ids
    if positions is not None and positions.numel():
        low, high = (int(x) for x in torch.aminmax(positions))
        if low < -1 or high >= a.k.shape[2]:
            raise ValueError(
                f"q_positions: got values in [{low}, {high}], expected -1 or "
                f"[0, {a.k.shape[2]}), the positions of the keys"
            )
        if a.distinct_positions:
            rising = positions.sort(dim=1).values
            repeated = ((rising[:, 1:] == rising[:, :-1]) & (rising[:, 1:] >= 0)).any(1)
            if bool(repeated.any()):
                row = int(torch.nonzero(repeated)[0])
                raise ValueError(
                    f"q_positions: got a repeated position in row {row}, expected each at most "
                    "once with distinct_positions"
                )
    if padding is not None and padding.shape[1]:
        edges = (padding[:, 1:] != padding[:, :-1]).sum(1)
        wrong = edges + padding[:, 0].int() + padding[:, -1].int() > 2
        if bool(wrong.any()):
            row = int(torch.nonzero(wrong)[0])
            raise ValueError(
                f"attention_mask: got a gap between tokens in row {row}, expected one run of True"
            )
    if documents is not None and bool((wrong := (documents.diff(dim=1) < 0).any(1)).any()):
        row = int(torch.nonzero(wrong)[0])
        raise ValueError(
            f"document_ids: got decreasing ids in row {row}, expected non-decreasing ones"
        )


def query_positions(a: AttentionArguments) -> Tensor:
    """Return the positions of the queries.

    Returns:
        int64 ``[batch, q_len]``, -1 for padding; ``[1, q_len]`` if all rows are equal.
    """
    if a.q_positions is None:
        return torch.arange(a.q.shape[2], device=a.q.device)[None]
    return a.q_positions.long()


def hides_keys(a: AttentionArguments) -> bool:
    """Return whether any key may be hidden from any query."""
    masks = (a.attention_mask, a.document_ids, a.q_positions)
    return a.causal or any(mask is not None for mask in masks)


def visible_keys(a: AttentionArguments, at: Tensor, rows: slice) -> Tensor:
    """Return the mask of the keys that each query of a block attends to.

    Args:
        a: arguments of the call.
        at: positions of the block's queries, ``[batch rows or 1, queries]``.
        rows: batch rows of the block.

    Returns:
        bool, broadcastable to ``[batch rows, queries, k_len]``, three-dimensional.
    """
    visible = (at >= 0)[:, :, None]
    if a.attention_mask is not None:
        visible = visible & a.attention_mask[rows, None, :]
    if a.document_ids is not None:
        documents = a.document_ids[rows]
        own = documents.gather(1, at.clamp(min=0).expand(documents.shape[0], -1))
        visible = visible & (own[:, :, None] == documents[:, None, :])
    if a.causal:
        visible = visible & (torch.arange(a.k.shape[2], device=at.device) <= at[:, :, None])
    return visible


def visible_ranges(a: AttentionArguments) -> tuple[Tensor, Tensor] | None:
    """Return which keys the query at each position sees, for kernels that read ranges.

    Padding is one run, documents are runs and causality is an upper bound, so a query sees one run
    of keys.

    Returns:
        First key and one past the last, int64 ``[batch, k_len]`` each, non-decreasing along a row.
        None if nothing is hidden.
    """
    batch, _, length, _ = a.k.shape
    if a.attention_mask is None and a.document_ids is None and not a.causal:
        return None
    at = torch.arange(length, device=a.k.device).expand(batch, length)
    begin, end = torch.zeros_like(at), torch.full_like(at, length)
    if a.document_ids is not None:
        ids = a.document_ids.contiguous()
        begin, end = torch.searchsorted(ids, ids), torch.searchsorted(ids, ids, right=True)
    if a.attention_mask is not None and length:
        real = a.attention_mask.long()
        first = real.argmax(1, keepdim=True)
        begin = begin.maximum(first)
        end = end.minimum(first + real.sum(1, keepdim=True))
    if a.causal:
        end = end.minimum(at + 1)
    return begin, end


def gathered_ranges(
    q_positions: Tensor, ranges: Sequence[Tensor] | None, length: int
) -> tuple[Tensor, Tensor]:
    """Return which keys gathered queries see: as `visible_ranges`, and (0, 0) for padding.

    Args:
        q_positions: ``[batch, queries]``, -1 for padding.
        ranges: first and one past the last key of all positions; None: nothing is hidden.
        length: keys per row.

    Returns:
        int64 ``[batch, queries]`` each.
    """
    at = q_positions.long()
    real = at >= 0
    begin, end = torch.zeros_like(at), torch.full_like(at, length)
    if ranges is not None:
        begin, end = (x.gather(1, at.clamp(min=0)) for x in ranges)
    return begin * real, end * real

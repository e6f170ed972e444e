"""Attention of packed rows: the tokens of all rows stand one after another, without padding.

The native backend computes every row by its length, the chunked one groups of rows of similar
length. The fused kernels and the reference take the packed tokens as the documents of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_deberta.ops import batched
from megatron_deberta.ops.arguments import AttentionArguments, score_dtype
from megatron_deberta.ops.chunked import (
    Blocks,
    backward_heads,
    forward_heads,
    is_batched,
    select_heads,
)
from megatron_deberta.ops.dispatch import choose_backend, disentangled_attention
from megatron_deberta.ops.dropout_bits import drop_threshold, pairs, row_keys
from megatron_deberta.ops.head_threads import for_heads
from megatron_deberta.ops.native import backend as native
from megatron_deberta.ops.position_terms import ConsecutiveTerms, Scratch
from megatron_deberta.ops.relative_positions import RelativePositions

_GROUP_COST = 6000
"""Scores whose time equals the overhead of one more group, on the CPU."""


@dataclass(frozen=True)
class PackedRows:
    """Lengths of rows whose tokens are packed in order.

    Attributes:
        lengths: tokens of each row; 0 is allowed.
        device: of the packed tokens.
    """

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Packed index of the first token of each row, and of the end."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        return tuple(starts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.starts[-1]

    @cached_property
    def document_ids(self) -> Tensor:
        """Row of each token, int64 ``[1, tokens]``."""
        lengths = torch.tensor(self.lengths, device=self.device)
        return torch.repeat_interleave(lengths, output_size=self.num_tokens)[None]

    @cached_property
    def groups(self) -> tuple[_Group, ...]:
        """Rows that are computed together, the group with the longest row first."""
        order = sorted(
            (row for row, length in enumerate(self.lengths) if length),
            key=lambda row: -self.lengths[row],
        )
        if not order:
            return ()
        bounds = _group_bounds([self.lengths[row] for row in order])
        return tuple(
            self._group(sorted(order[first:last]))
            for first, last in zip(bounds, bounds[1:], strict=False)
        )

    def _group(self, rows: list[int]) -> _Group:
        lengths = [self.lengths[row] for row in rows]
        longest, index = max(lengths), torch.tensor(rows, device=self.device)
        if min(lengths) == longest and rows[-1] - rows[0] == len(rows) - 1:
            return _Group(index, longest, self.starts[rows[0]], None, None)
        starts = torch.tensor([self.starts[row] for row in rows], device=self.device)
        inside = torch.arange(longest, device=self.device)
        real = inside < torch.tensor(lengths, device=self.device)[:, None]
        tokens = torch.where(real, starts[:, None] + inside, starts[:, None])
        return _Group(index, longest, 0, tokens, real)


@dataclass(frozen=True)
class _Group:
    """Rows computed by one call.

    Attributes:
        rows: int64 ``[n]``.
        length: of the longest row.
        start: packed index of the first token, of adjacent rows of equal length.
        tokens: int64 ``[n, length]`` packed index of each token, of other rows.
        real: bool ``[n, length]``, False = padding, of other rows.
    """

    rows: Tensor
    length: int
    start: int
    tokens: Tensor | None
    real: Tensor | None

    def take(self, packed: Tensor) -> Tensor:
        """Return ``[n, heads, length, size]`` of ``[tokens, heads, size]``; a view if adjacent."""
        if self.tokens is not None:
            return packed[self.tokens].transpose(1, 2)
        size = len(self.rows) * self.length
        rows = packed[self.start : self.start + size].unflatten(0, (-1, self.length))
        return cast(Tensor, rows.transpose(1, 2))

    def put(self, packed: Tensor, value: Tensor) -> None:
        """Write a gathered ``[n, heads, length, size]`` to ``[tokens, heads, size]``."""
        if self.tokens is not None and self.real is not None:
            packed[self.tokens[self.real]] = value.transpose(1, 2)[self.real]


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    positions: RelativePositions,
    rows: PackedRows,
    *,
    dropout_p: float,
    seed: Tensor | None,
    scale: float,
    backend: str | None = None,
) -> Tensor:
    """Compute disentangled attention within each of the packed rows.

    Args:
        q: ``[tokens, heads, head_dim]``; tokens beyond those of the rows give zeros.
        k: like ``q``.
        v: like ``q``.
        pos_key: ``[heads, 2 * span, head_dim]`` or None.
        pos_query: likewise.
        positions: map from distances to slots.
        rows: the rows.
        dropout_p: dropout of attention probabilities, rounded to a multiple of 1/256.
        seed: int64 ``[rows]``; None: no dropout.
        scale: factor on scores.
        backend: see ``disentangled_attention``.

    Returns:
        Like ``q``.
    """
    if seed is None or drop_threshold(dropout_p) == 0:
        dropout_p, seed = 0.0, None
    chosen = choose_backend(backend, q)
    if rows.num_tokens and chosen == "native":
        longest = max(rows.lengths)
        starts, lengths = (torch.tensor(x, device="cpu") for x in (rows.starts[:-1], rows.lengths))
        pairs_of_keys = pairs(torch.arange(longest, device="cpu"))
        keys = None if seed is None else row_keys(seed, pairs_of_keys, q.shape[1], 0)
        options = native.RowOptions(
            positions, "microsoft", scale, dropout_p, keys, starts, lengths, longest
        )
        return native.attend_rows(q, k, v, pos_key, pos_query, options)[0]
    if rows.num_tokens and chosen == "chunked":
        out = _PackedAttention.apply(
            q, k, v, pos_key, pos_query, positions, rows, dropout_p, seed, scale
        )
        return cast(Tensor, out)
    heads = [x[: rows.num_tokens].transpose(0, 1)[None] for x in (q, k, v)]
    out = disentangled_attention(
        heads[0],
        heads[1],
        heads[2],
        pos_key,
        pos_query,
        positions,
        document_ids=rows.document_ids,
        dropout_p=dropout_p,
        seed=None if seed is None else seed[:1],
        scale=scale,
        backend=backend,
    )
    packed = out[0].transpose(0, 1)
    return torch.nn.functional.pad(packed, (0, 0, 0, 0, 0, len(q) - rows.num_tokens))


class _PackedAttention(torch.autograd.Function):
    """The chunked backend on groups of rows, with its own backward."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.save_for_backward(*inputs[:5])
        ctx.options = inputs[5:]
        call = _Call(*inputs)
        out = torch.zeros_like(call.q, memory_format=torch.contiguous_format)
        outs = [call.like(group, out) for group in call.rows.groups]

        def work(heads: slice) -> None:
            tables = call.tables(heads)
            for a, value in zip(call.arguments, outs, strict=True):
                forward_heads(Blocks(select_heads(a, heads), tables), value[:, heads], None)

        if is_batched(call.q.device):
            for a, value in zip(call.arguments, outs, strict=True):
                value.copy_(batched.forward(a)[0])
        else:
            call.for_heads(work)
        for group, value in zip(call.rows.groups, outs, strict=True):
            group.put(out, value)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        call = _Call(*ctx.saved_tensors, *ctx.options)
        wide = score_dtype(call.arguments[0])
        d_q, d_k, d_v = (
            torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)
            for x, dtype in ((call.q, call.q.dtype), (call.k, wide), (call.v, wide))
        )
        d_pos_key, d_pos_query = (
            None if x is None else torch.empty_like(x) for x in (call.pos_key, call.pos_query)
        )
        groups = call.rows.groups
        grads = [tuple(call.like(group, x) for x in (d_q, d_k, d_v)) for group in groups]
        d_outs = [
            group.take(d_out)
            if group.real is None
            else group.take(d_out).masked_fill(~group.real[:, None, :, None], 0.0)
            for group in groups
        ]

        def work(heads: slice) -> None:
            tables = call.tables(heads, gradients=True)
            for a, grad, d_o in zip(call.arguments, grads, d_outs, strict=True):
                blocks = Blocks(select_heads(a, heads), tables)
                backward_heads(blocks, *(x[:, heads] for x in (d_o, *grad)))
            tables.write_gradients(d_pos_key, d_pos_query, heads)

        if is_batched(call.q.device):
            d_pos_key, d_pos_query = _batched_gradients(call.arguments, d_outs, grads)
        else:
            call.for_heads(work)
        for group, grad in zip(groups, grads, strict=True):
            for packed, value in zip((d_q, d_k, d_v), grad, strict=True):
                group.put(packed, value)
        rest = (None for _ in ctx.options)
        return d_q, d_k.to(call.k.dtype), d_v.to(call.v.dtype), d_pos_key, d_pos_query, *rest


def _batched_gradients(
    arguments: Sequence[AttentionArguments],
    d_outs: Sequence[Tensor],
    grads: Sequence[tuple[Tensor, ...]],
) -> list[Tensor | None]:
    """Write the gradients of each group's q, k and v; return those of the two position tables."""
    tables: list[list[Tensor]] = [[], []]
    for a, d_out, grad in zip(arguments, d_outs, grads, strict=True):
        *vectors, d_pos_key, d_pos_query = batched.backward(a, d_out)
        for target, value in zip(grad, vectors, strict=True):
            assert value is not None
            target.copy_(value)
        for parts, part in zip(tables, (d_pos_key, d_pos_query), strict=True):
            parts.extend([] if part is None else [part])
    return [torch.stack(parts).sum(0) if parts else None for parts in tables]


@dataclass(frozen=True)
class _Call:
    """Arguments of ``packed_attention``, and those of the groups' calls."""

    q: Tensor
    k: Tensor
    v: Tensor
    pos_key: Tensor | None
    pos_query: Tensor | None
    positions: RelativePositions
    rows: PackedRows
    dropout_p: float
    seed: Tensor | None
    scale: float

    @cached_property
    def arguments(self) -> list[AttentionArguments]:
        """Arguments of each group's call."""
        return [
            AttentionArguments(
                group.take(self.q), group.take(self.k), group.take(self.v),
                self.pos_key, self.pos_query, self.positions, None, group.real, None, False,
                self.dropout_p, None if self.seed is None else self.seed[group.rows],
                0, self.scale, "microsoft", False,
            )
            for group in self.rows.groups
        ]  # fmt: skip

    def like(self, group: _Group, packed: Tensor) -> Tensor:
        """Return where a group writes: a view of ``packed``, or zeros to be put there later."""
        if group.tokens is None:
            return group.take(packed)
        rows, length = group.tokens.shape
        return packed.new_zeros(rows, packed.shape[1], length, packed.shape[2])

    def tables(self, heads: slice, *, gradients: bool = False) -> ConsecutiveTerms:
        """Lay out the position tables for the longest rows, which come first."""
        a = select_heads(self.arguments[0], heads)
        terms = ConsecutiveTerms(a, Scratch(a.q, score_dtype(a)))
        for table in (terms.c2p, terms.p2c):
            if gradients and table is not None:
                table.gradient()
        return terms

    def for_heads(self, work: Any) -> None:
        """Call ``work`` for slices of heads, in parallel."""
        heads = self.q.shape[1]
        scores = heads * sum(len(group.rows) * group.length**2 for group in self.rows.groups)
        for_heads(work, heads, scores)


def _group_bounds(lengths: list[int]) -> list[int]:
    """Return where to cut falling lengths into groups, for the least estimated time."""
    best, cut = [0.0], [0]
    for stop in range(1, len(lengths) + 1):
        costs = [
            best[start] + (stop - start) * lengths[start] ** 2 + _GROUP_COST
            for start in range(stop)
        ]
        cut.append(min(range(stop), key=costs.__getitem__))
        best.append(costs[cut[-1]])
    bounds = [len(lengths)]
    while bounds[-1]:
        bounds.append(cut[bounds[-1]])
    return bounds[::-1]

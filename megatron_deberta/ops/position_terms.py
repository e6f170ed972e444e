"""The two position terms of the scores, block by block, and their gradients.

A block is one head, some batch rows, some queries and all keys. If queries are consecutive,
neighbouring elements of a score row are neighbouring distances, so a product of queries with the
table in linear form (one row per distance) holds the whole term on its diagonals::

    product[x, t] = q_x . table[t],  t = j + (size - 1 - x)   =>   term[x, j] = product[x, t(x, j)]

and a strided view reads it without a gather (``diagonals``). Gathered queries stand at arbitrary
positions; their terms are gathered from a product with the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_deberta.ops.arguments import AttentionArguments

_T = TypeVar("_T")

STRIP = 128
"""Queries (keys) multiplied at once by a window of the c2p (p2c) table. A window is longer than the
distances of a query by this much: larger strips waste arithmetic, smaller ones take more calls."""
_KEY_STRIP = 2048
"""Keys multiplied at once by the p2c table for gathered queries; bounds memory on long rows."""


@dataclass
class Scratch:
    """Buffers reused from block to block; most blocks of a call have the same shape.

    Args:
        like: tensor on the device to allocate on.
        dtype: of the buffers.
    """

    like: Tensor
    dtype: torch.dtype
    _buffers: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict, init=False)

    def get(self, name: str, *shape: int) -> Tensor:
        """Return a contiguous buffer: zeros at first, later as its last user left it."""
        key = (name, shape)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(shape, device=self.like.device, dtype=self.dtype)
        return self._buffers[key]


@dataclass(slots=True)
class Table:
    """A position table of one call, one row per column of the products, and its gradient.

    Attributes:
        rows: ``[heads, columns, head_dim]``.
        slots: int64 ``[columns]``, the slot of each row.
        falling: whether the slots decrease.
        num_slots: slots of the position table.
        factor: the rows are those of the position table times this.
        grad: gradient of ``rows`` so far.
    """

    rows: Tensor
    slots: Tensor
    falling: bool
    num_slots: int
    factor: float
    grad: Tensor | None = None

    @staticmethod
    def lay_out(
        table: Tensor | None,
        slots: Tensor,
        dtype: torch.dtype,
        *,
        factor: float = 1.0,
        falling: bool,
    ) -> Table | None:
        """Copy slots to columns.

        Args:
            table: ``[heads, 2 * span, head_dim]``; None: the call has no such term.
            slots: int64 ``[columns]``, monotonic.
            dtype: of the copy.
            factor: multiplies every row.
            falling: whether the slots decrease.
        """
        if table is None:
            return None
        rows = table.to(dtype).index_select(1, slots).mul_(factor)
        return Table(rows, slots, falling, table.shape[1], factor)

    def narrow(self, columns: slice) -> Table:
        """Return some columns of the table; an existing gradient is shared."""
        grad = None if self.grad is None else self.grad[:, columns]
        return replace(self, rows=self.rows[:, columns], slots=self.slots[columns], grad=grad)

    def gradient(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the gradient of ``rows`` so far; ``dtype`` is that of a new one, None: theirs."""
        if self.grad is None:
            self.grad = torch.zeros_like(self.rows, dtype=dtype)
        return self.grad

    def folded_gradient(self) -> Tensor:
        """Sum the gradients of the rows of each slot in a fixed order."""
        by_column = self.gradient().transpose(0, 1)
        by_column = by_column.flip(0) if self.falling else by_column.contiguous()
        ordered = self.slots.flip(0) if self.falling else self.slots
        bounds = torch.arange(self.num_slots + 1, device=ordered.device)
        lengths = torch.searchsorted(ordered.contiguous(), bounds).diff()
        # "unsafe" only skips a check of the lengths, which would synchronise with the device.
        folded = torch.segment_reduce(by_column, "sum", lengths=lengths, unsafe=True)
        return folded.transpose(0, 1).mul_(self.factor)


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """One head, batch rows ``rows`` and queries ``queries`` of a call, against all keys."""

    head: int
    rows: slice
    queries: slice


class _Strip(NamedTuple):
    """Vectors (queries or keys) and the columns of their table that they are multiplied by.

    Attributes:
        vectors: of the block.
        columns: of the table.
        score_columns: column of each score ``[rows, vectors, scores]``; None: they are on the
            diagonals.
    """

    vectors: slice
    columns: slice
    score_columns: Tensor | None = None


def linear_tables(
    a: AttentionArguments, dtype: torch.dtype, p2c_factor: float = 1.0
) -> tuple[Table | None, Table | None]:
    """Lay out the tables of c2p and of p2c, one row per distance, as ``diagonals`` reads them.

    Args:
        a: checked arguments.
        dtype: of the rows.
        p2c_factor: multiplies every row of the second table.
    """
    length, slots = a.k.shape[2], a.positions.slots
    rising = torch.arange(1 - length, length, device=a.q.device)
    # Distances decrease along a score row and increase along a score column.
    sign = 1 if a.p2c_index == "microsoft" else -1
    c2p = Table.lay_out(a.pos_key, slots(-rising), dtype, falling=True)
    p2c_slots = slots(sign * rising)
    p2c = Table.lay_out(a.pos_query, p2c_slots, dtype, factor=p2c_factor, falling=sign < 0)
    return c2p, p2c


class PositionTerms:
    """Both position terms of a call, computed in the strips that the subclasses choose.

    Args:
        a: checked arguments.
        scratch: buffers of the call, in the dtype of the scores.

    Attributes:
        c2p: table of the content-to-position term; None: there is no such term.
        p2c: the same of the position-to-content term.
        largest_product: elements of a batch row's largest product with a table.
    """

    c2p: Table | None
    p2c: Table | None
    largest_product: int

    def __init__(self, a: AttentionArguments, scratch: Scratch) -> None:
        """See the class."""
        self._length, self._scratch = a.k.shape[2], scratch

    def _strips(self, term: str, block: ScoreBlock) -> Iterator[_Strip]:
        """Yield strips of the block's queries for ``c2p``, of its keys for ``p2c``."""
        raise NotImplementedError

    def add_to(self, scores: Tensor, q: Tensor, k: Tensor, block: ScoreBlock) -> None:
        """Add the terms to a block of scores.

        Args:
            scores: ``[rows, queries, k_len]``.
            q: scaled queries ``[rows, queries, head_dim]``.
            k: keys ``[rows, k_len, head_dim]``.
            block: the block.
        """
        for term, table, x, by_x in self._terms(scores, q, k):
            for strip in self._strips(term, block):
                vectors, rows = x[:, strip.vectors], table.rows[block.head, strip.columns]
                out = self._scratch.get(term, *vectors.shape[:2], len(rows))
                product = torch.bmm(vectors, rows.t().expand(len(x), -1, -1), out=out)
                if strip.score_columns is None:
                    values = diagonals(product, by_x.shape[2])
                else:
                    values = product.gather(-1, strip.score_columns)
                by_x[:, strip.vectors].add_(values)

    def add_gradients(
        self, d_scores: Tensor, q: Tensor, k: Tensor, d_q: Tensor, d_k: Tensor, block: ScoreBlock
    ) -> None:
        """Add the terms' gradients to those of the block's queries, keys and the tables.

        Args:
            d_scores: gradient of the scores ``[rows, queries, k_len]``.
            q: scaled queries ``[rows, queries, head_dim]``.
            k: keys ``[rows, k_len, head_dim]``.
            d_q: gradient of the scaled queries.
            d_k: gradient of the keys.
            block: the block.
        """
        for term, table, (x, d_x), by_x in self._terms(d_scores, (q, d_q), (k, d_k)):
            for strip in self._strips(term, block):
                vectors, rows = x[:, strip.vectors], table.rows[block.head, strip.columns]
                d_strip = by_x[:, strip.vectors]
                d_product = self._scratch.get(f"{term} gradient", *vectors.shape[:2], len(rows))
                if (
                    strip.score_columns is None
                ):  # only the diagonals are ever written: the rest stays zero
                    diagonals(d_product, by_x.shape[2]).copy_(d_strip)
                else:
                    d_product.zero_().scatter_add_(-1, strip.score_columns, d_strip)
                d_x[:, strip.vectors].baddbmm_(d_product, rows.expand(len(x), -1, -1))
                gradient = table.gradient()[block.head, strip.columns]
                gradient.addmm_(d_product.flatten(0, 1).t(), vectors.flatten(0, 1))

    def write_gradients(
        self, d_pos_key: Tensor | None, d_pos_query: Tensor | None, heads: slice
    ) -> None:
        """Write the gradients of the position tables of some heads.

        Args:
            d_pos_key: ``[heads, 2 * span, head_dim]``; None: there is no such table.
            d_pos_query: the same.
            heads: those of this call.
        """
        for table, gradient in ((self.c2p, d_pos_key), (self.p2c, d_pos_query)):
            if table is not None and gradient is not None:
                gradient[heads] = table.folded_gradient()

    def _terms(self, scores: Tensor, q: _T, k: _T) -> Iterator[tuple[str, Table, _T, Tensor]]:
        """Yield each term's name, table, vectors and the scores with these vectors as rows."""
        if self.c2p is not None:
            yield "c2p", self.c2p, q, scores
        if self.p2c is not None:
            yield "p2c", self.p2c, k, scores.transpose(1, 2)


class ConsecutiveTerms(PositionTerms):
    """Position terms of consecutive queries: query i is at position i.

    Args:
        a: checked arguments.
        scratch: buffers of the call, in the dtype of the scores.
        shared: terms of rows that are at least as long, whose tables and gradients are used.
    """

    def __init__(
        self, a: AttentionArguments, scratch: Scratch, shared: ConsecutiveTerms | None = None
    ) -> None:
        """See the class."""
        super().__init__(a, scratch)
        length = self._length
        strip = min(STRIP, length)
        self.largest_product = strip * (length + strip)
        if shared is None:
            self.c2p, self.p2c = linear_tables(a, scratch.dtype, a.scale)
            return
        columns = slice(shared._length - length, shared._length + length - 1)
        self.c2p, self.p2c = (
            None if table is None else table.narrow(columns) for table in (shared.c2p, shared.p2c)
        )

    def _strips(self, term: str, block: ScoreBlock) -> Iterator[_Strip]:
        first, last, length = block.queries.start, block.queries.stop, self._length
        if term == "c2p":
            for start in range(first, last, STRIP):
                stop = min(start + STRIP, last)
                columns = slice(length - stop, 2 * length - 1 - start)
                yield _Strip(slice(start - first, stop - first), columns)
            return
        for start in range(0, length, STRIP):
            stop = min(start + STRIP, length)
            yield _Strip(
                slice(start, stop), slice(length + first - stop, length + last - start - 1)
            )


class GatheredTerms(PositionTerms):
    """Position terms of gathered queries, at positions ``at``, int64 ``[batch, q_len]``."""

    def __init__(self, a: AttentionArguments, scratch: Scratch, at: Tensor) -> None:
        """Initialize as the base class does."""
        super().__init__(a, scratch)
        self._at, self._positions, length = at, a.positions, self._length
        self._sign = 1 if a.p2c_index == "microsoft" else -1
        # By slot there are fewer columns for long rows; by distance no two keys of a query share
        # a column, so sums with CUDA's atomics are deterministic.
        num_slots = 2 * self._positions.span
        self._by_slot = a.q.device.type == "cpu" and num_slots < 2 * length - 1
        if self._by_slot:
            slots = torch.arange(num_slots, device=a.q.device)
        else:
            slots = self._positions.slots(torch.arange(1 - length, length, device=a.q.device))
        dtype = scratch.dtype
        self.c2p = Table.lay_out(a.pos_key, slots, dtype, falling=False)
        self.p2c = Table.lay_out(a.pos_query, slots, dtype, factor=a.scale, falling=False)
        self.largest_product = min(length, _KEY_STRIP) * slots.numel()
        self._cached: tuple[slice, slice] | None = None

    def _strips(self, term: str, block: ScoreBlock) -> Iterator[_Strip]:
        self._set_columns(block)
        every = slice(None)
        if term == "c2p":
            yield _Strip(every, every, self._c2p_columns)
            return
        for start in range(0, self._length, _KEY_STRIP):
            keys = slice(start, min(start + _KEY_STRIP, self._length))
            yield _Strip(keys, every, self._p2c_columns[:, keys])

    def _set_columns(self, block: ScoreBlock) -> None:
        """Set the columns of a block's distances, which its heads share."""
        if self._cached == (block.rows, block.queries):
            return
        at = self._at[block.rows, block.queries]
        # Padding queries (-1) are masked elsewhere; any distance in range is valid for them.
        distance = at.clamp(min=0)[:, :, None] - torch.arange(self._length, device=at.device)
        self._c2p_columns = self._columns(distance)
        self._p2c_columns = self._columns((self._sign * distance).transpose(1, 2).contiguous())
        self._cached = (block.rows, block.queries)

    def _columns(self, distance: Tensor) -> Tensor:
        return self._positions.slots(distance) if self._by_slot else distance + self._length - 1


def diagonals(product: Tensor, length: int) -> Tensor:
    """Return ``[rows, size, length]``, a view of a product's elements [r, x, j + size - 1 - x]."""
    rows, size, columns = product.shape
    strides = (size * columns, columns - 1, 1)
    return product.as_strided((rows, size, length), strides, product.storage_offset() + size - 1)

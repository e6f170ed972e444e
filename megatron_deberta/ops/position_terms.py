"""The two position terms of the scores, block by block, and their gradients.

A block is one head, some batch rows, some queries and all keys. If queries are consecutive,
neighbouring elements of a score row are neighbouring distances, so a product of queries with the
table in linear form (one row per distance) holds the whole term on its diagonals::

    product[x, t] = q_x . table[t],  t = j + (size - 1 - x)   =>   term[x, j] = product[x, t(x, j)]

and a strided view reads it without a gather (``_diagonals``). Gathered queries stand at arbitrary
positions; their terms are gathered from a product with the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_deberta.ops.arguments import AttentionArguments

STRIP = 128
"""Queries (keys) multiplied at once by a window of the c2p (p2c) table. A window is longer than the
distances of a query by this much: larger strips waste arithmetic, smaller ones take more calls."""


_KEY_STRIP = 2048
"""Keys multiplied at once by the p2c table for gathered queries; bounds memory on long rows."""


class Scratch:
    """Buffers reused from block to block; most blocks of a call have the same shape.

    Args:
        like: tensor on the device to allocate on.
        dtype: of the buffers.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        """See the class."""
        self._device, self._dtype = like.device, dtype
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def get(self, name: str, *shape: int) -> Tensor:
        """Return a contiguous buffer: zeros at first, later as its last user left it."""
        key = (name, shape)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(shape, device=self._device, dtype=self._dtype)
        return self._buffers[key]


@dataclass(slots=True)
class Table:
    """A position table of one call, one row per column of the products, and its gradient."""

    rows: Tensor
    """``[heads, columns, head_dim]``"""
    slots: Tensor
    """int64 ``[columns]``, the slot of each row."""
    falling: bool
    """Whether slots decrease along the columns; otherwise they increase."""
    grad: Tensor | None = None

    @staticmethod
    def lay_out(
        table: Tensor, slots: Tensor, dtype: torch.dtype, *, factor: float = 1.0, falling: bool
    ) -> Table:
        """Copy slots to columns.

        Args:
            table: ``[heads, 2 * span, head_dim]``.
            slots: int64 ``[columns]``, monotonic.
            dtype: of the copy.
            factor: multiplies every row.
            falling: whether the slots decrease.
        """
        return Table(table.to(dtype).index_select(1, slots).mul_(factor), slots, falling)

    def gradient(self) -> Tensor:
        """Return the gradient of ``rows`` so far."""
        if self.grad is None:
            self.grad = torch.zeros_like(self.rows)
        return self.grad

    def folded_gradient(self, slots: int, factor: float) -> Tensor:
        """Sum the gradients of the rows of each slot in a fixed order.

        Args:
            slots: number of slots.
            factor: the factor the rows were laid out with.
        """
        by_column = self.gradient().transpose(0, 1)
        by_column = by_column.flip(0) if self.falling else by_column.contiguous()
        lengths = self.slots.new_zeros(slots)
        lengths.index_add_(0, self.slots, torch.ones_like(self.slots))
        # "unsafe" only skips a check of the lengths, which would synchronise with the device.
        folded = torch.segment_reduce(by_column, "sum", lengths=lengths, unsafe=True)
        return folded.transpose(0, 1).mul_(factor)


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """One head, batch rows ``rows`` and queries ``queries`` of a call, against all keys."""

    head: int
    rows: slice
    queries: slice


class ConsecutiveTerms:
    """Position terms of consecutive queries: query i is at position i.

    Args:
        a: checked arguments.
        dtype: of the scores.
        scratch: buffers of the call.
    """

    def __init__(self, a: AttentionArguments, dtype: torch.dtype, scratch: Scratch) -> None:
        """See the class."""
        self._length, self._scratch = a.k.shape[2], scratch
        rising = torch.arange(1 - self._length, self._length, device=a.q.device)
        positions, sign = a.rules.positions, 1 if a.rules.p2c_index == "released" else -1
        self.c2p = self.p2c = None
        if a.pos_key is not None:  # distances decrease along a score row
            self.c2p = Table.lay_out(a.pos_key, positions.slots(-rising), dtype, falling=True)
        if a.pos_query is not None:  # and increase along a score column
            slots = positions.slots(sign * rising)
            self.p2c = Table.lay_out(
                a.pos_query, slots, dtype, factor=a.rules.scale, falling=sign < 0
            )
        strip = min(STRIP, self._length)
        self.largest_product = strip * (self._length + strip)

    def add_to(self, scores: Tensor, q: Tensor, k: Tensor, block: ScoreBlock) -> None:
        """Add the terms to a block of scores.

        Args:
            scores: ``[rows, queries, k_len]``.
            q: scaled queries ``[rows, queries, head_dim]``.
            k: keys ``[rows, k_len, head_dim]``.
            block: the block.
        """
        if self.c2p is not None:
            for strip, window in self._query_strips(block):
                table = self.c2p.rows[block.head, window]
                product = self._product("c2p", q[:, strip], table)
                scores[:, strip].add_(_diagonals(product, self._length))
        if self.p2c is not None:
            transposed, size = scores.transpose(1, 2), scores.shape[1]
            for strip, window in self._key_strips(block):
                table = self.p2c.rows[block.head, window]
                product = self._product("p2c", k[:, strip], table)
                transposed[:, strip].add_(_diagonals(product, size))

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
        if self.c2p is not None:
            for strip, window in self._query_strips(block):
                self._strip_gradients("c2p", self.c2p, d_scores, q, d_q, block.head, strip, window)
        if self.p2c is not None:
            transposed = d_scores.transpose(1, 2)
            for strip, window in self._key_strips(block):
                self._strip_gradients(
                    "p2c", self.p2c, transposed, k, d_k, block.head, strip, window
                )

    def _strip_gradients(
        self,
        name: str,
        table: Table,
        d_scores: Tensor,
        x: Tensor,
        d_x: Tensor,
        head: int,
        strip: slice,
        window: slice,
    ) -> None:
        """Add the gradients of one strip's product: of its vectors and of the table's window."""
        d_strip, x_strip = d_scores[:, strip], x[:, strip]
        rows, size, length = d_strip.shape
        # Only the diagonals are ever written; the rest of the buffer stays zero.
        d_product = self._scratch.get(name + " gradient", rows, size, window.stop - window.start)
        _diagonals(d_product, length).copy_(d_strip)
        d_x[:, strip].baddbmm_(d_product, table.rows[head, window].expand(rows, -1, -1))
        flat = d_product.view(rows * size, -1)
        table.gradient()[head, window].addmm_(flat.t(), x_strip.reshape(rows * size, -1))

    def _product(self, name: str, x: Tensor, window: Tensor) -> Tensor:
        """Return the products ``[rows, size, columns]`` of vectors with a window of a table."""
        rows, size, _ = x.shape
        out = self._scratch.get(name, rows, size, window.shape[0])
        return torch.bmm(x, window.t().expand(rows, -1, -1), out=out)

    def _query_strips(self, block: ScoreBlock) -> Iterator[tuple[slice, slice]]:
        """Yield strips of queries (within the block) and their windows of the c2p table."""
        first, last = block.queries.start, block.queries.stop
        for start in range(first, last, STRIP):
            stop = min(start + STRIP, last)
            window = slice(self._length - stop, 2 * self._length - 1 - start)
            yield slice(start - first, stop - first), window

    def _key_strips(self, block: ScoreBlock) -> Iterator[tuple[slice, slice]]:
        """Yield strips of keys and their windows of the p2c table."""
        first, last = block.queries.start, block.queries.stop
        for start in range(0, self._length, STRIP):
            stop = min(start + STRIP, self._length)
            window = slice(self._length + first - stop, self._length + last - start - 1)
            yield slice(start, stop), window


class GatheredTerms:
    """Position terms of gathered queries.

    Args:
        a: checked arguments.
        dtype: of the scores.
        scratch: buffers of the call.
        at: positions of the queries, int64 ``[batch, q_len]``.
    """

    def __init__(
        self, a: AttentionArguments, dtype: torch.dtype, scratch: Scratch, at: Tensor
    ) -> None:
        """See the class."""
        self._at, self._length, self._scratch = at, a.k.shape[2], scratch
        self._positions = a.rules.positions
        self._sign = 1 if a.rules.p2c_index == "released" else -1
        distances = 2 * self._length - 1
        # By slot there are fewer columns for long rows; by distance no two keys of a query share
        # a column, so sums with CUDA's atomics are deterministic.
        self._by_slot = a.q.device.type == "cpu" and 2 * self._positions.span < distances
        slots = torch.arange(2 * self._positions.span, device=a.q.device)
        if not self._by_slot:
            rising = torch.arange(1 - self._length, self._length, device=a.q.device)
            slots = self._positions.slots(rising)
        self.c2p = self.p2c = None
        if a.pos_key is not None:
            self.c2p = Table.lay_out(a.pos_key, slots, dtype, falling=False)
        if a.pos_query is not None:
            self.p2c = Table.lay_out(a.pos_query, slots, dtype, factor=a.rules.scale, falling=False)
        self.largest_product = min(self._length, _KEY_STRIP) * slots.numel()
        self._cached: tuple[slice, slice] | None = None

    def add_to(self, scores: Tensor, q: Tensor, k: Tensor, block: ScoreBlock) -> None:
        """As ``ConsecutiveTerms.add_to``."""
        self._set_columns(block)
        if self.c2p is not None:
            product = self._product("c2p", q, self.c2p, block.head)
            scores.add_(product.gather(-1, self._c2p_columns))
        if self.p2c is not None:
            for strip in self._key_strips():
                product = self._product("p2c", k[:, strip], self.p2c, block.head)
                term = product.gather(-1, self._p2c_columns[:, strip])
                scores[:, :, strip].transpose(1, 2).add_(term)

    def add_gradients(
        self, d_scores: Tensor, q: Tensor, k: Tensor, d_q: Tensor, d_k: Tensor, block: ScoreBlock
    ) -> None:
        """As ``ConsecutiveTerms.add_gradients``."""
        self._set_columns(block)
        if self.c2p is not None:
            self._gradients(self.c2p, d_scores, self._c2p_columns, q, d_q, block.head)
        if self.p2c is not None:
            for strip in self._key_strips():
                d_strip = d_scores[:, :, strip].transpose(1, 2)
                columns = self._p2c_columns[:, strip]
                self._gradients(self.p2c, d_strip, columns, k[:, strip], d_k[:, strip], block.head)

    def _key_strips(self) -> Iterator[slice]:
        for start in range(0, self._length, _KEY_STRIP):
            yield slice(start, min(start + _KEY_STRIP, self._length))

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

    def _product(self, name: str, x: Tensor, table: Table, head: int) -> Tensor:
        out = self._scratch.get(name, x.shape[0], x.shape[1], table.rows.shape[1])
        return torch.bmm(x, table.rows[head].t().expand(x.shape[0], -1, -1), out=out)

    def _gradients(
        self, table: Table, d_scores: Tensor, columns: Tensor, x: Tensor, d_x: Tensor, head: int
    ) -> None:
        rows, size, _ = x.shape
        d_product = self._scratch.get("gathered gradient", rows, size, table.rows.shape[1])
        d_product.zero_().scatter_add_(-1, columns, d_scores)
        d_x.baddbmm_(d_product, table.rows[head].expand(rows, -1, -1))
        flat = d_product.view(rows * size, -1)
        table.gradient()[head].addmm_(flat.t(), x.reshape(rows * size, -1))


def _diagonals(product: Tensor, length: int) -> Tensor:
    """Return ``[rows, size, length]``, a view of a product's elements [r, x, j + size - 1 - x]."""
    rows, size, columns = product.shape
    strides = (size * columns, columns - 1, 1)
    return product.as_strided((rows, size, length), strides, product.storage_offset() + size - 1)

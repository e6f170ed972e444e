"""The two position terms of the scores, block by block, and their gradients.

A block is one head, some batch rows, some queries and all keys. Where queries stand one after
another, neighbouring elements of a score row are neighbouring distances, so a product of queries
with the table laid out by distance holds the whole term on its diagonals::

    product[x, t] = q_x . table[t],  t = j + (size - 1 - x)   =>   term[x, j] = product[x, t(x, j)]

and a strided view reads it without a gather (``_diagonals``). Gathered queries stand anywhere;
they gather from a product with the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_deberta.ops.arguments import AttentionArguments

STRIP = 128
"""Queries (keys) multiplied at once with a window of the c2p (p2c) table: a window is longer than
the distances of one query by this much, so larger wastes arithmetic and smaller wastes calls."""


_KEY_STRIP = 2048
"""Keys that gathered queries multiply at once with the p2c table: bounds memory on long rows."""


class Scratch:
    """Buffers kept from block to block; most blocks of a call have the same shape."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        """Starts empty.

        Args:
            like: tensor on the device to allocate on.
            dtype: of the buffers.
        """
        self._device, self._dtype = like.device, dtype
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def get(self, name: str, *shape: int) -> Tensor:
        """A contiguous buffer; zero when first handed out, then as its last user left it.

        Args:
            name: what it is for.
            *shape: its shape.
        """
        key = (name, shape)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(shape, device=self._device, dtype=self._dtype)
        return self._buffers[key]


@dataclass(slots=True)
class Table:
    """A position table of one call: one row a column of the products, and its gradient."""

    rows: Tensor
    """``[heads, columns, head_dim]``"""
    slots: Tensor
    """int64 ``[columns]``, the slot each row is a copy of."""
    falling: bool
    """Whether slots fall along the columns; otherwise they rise."""
    grad: Tensor | None = None

    @staticmethod
    def lay_out(
        table: Tensor, slots: Tensor, dtype: torch.dtype, *, factor: float = 1.0, falling: bool
    ) -> Table:
        """Copies slots to columns.

        Args:
            table: ``[heads, 2 * span, head_dim]``.
            slots: int64 ``[columns]``, rising or falling.
            dtype: of the copy.
            factor: multiplies every row.
            falling: whether the slots fall.
        """
        return Table(table.to(dtype).index_select(1, slots).mul_(factor), slots, falling)

    def gradient(self) -> Tensor:
        """The gradient with respect to ``rows`` so far, zero at first."""
        if self.grad is None:
            self.grad = torch.zeros_like(self.rows)
        return self.grad

    def folded_gradient(self, slots: int, factor: float) -> Tensor:
        """Sums the gradients of the rows of each slot, in a fixed order.

        Args:
            slots: rows of the table that the columns were laid out from.
            factor: the factor the rows were laid out with.
        """
        by_column = self.gradient().transpose(0, 1)
        by_column = by_column.flip(0) if self.falling else by_column.contiguous()
        lengths = self.slots.new_zeros(slots)
        lengths.index_add_(0, self.slots, torch.ones_like(self.slots))
        # "unsafe" only leaves out a look at the lengths, which would wait for the device.
        folded = torch.segment_reduce(by_column, "sum", lengths=lengths, unsafe=True)
        return folded.transpose(0, 1).mul_(factor)


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """One head, batch rows ``rows`` and queries ``queries`` of a call, against all keys."""

    head: int
    rows: slice
    queries: slice


class ConsecutiveTerms:
    """Position terms where query i stands at i."""

    def __init__(self, a: AttentionArguments, dtype: torch.dtype, scratch: Scratch) -> None:
        """Lays both tables out, one row a distance.

        Args:
            a: checked arguments.
            dtype: in which scores are computed.
            scratch: buffers of the call.
        """
        self._length, self._scratch = a.k.shape[2], scratch
        rising = torch.arange(1 - self._length, self._length, device=a.q.device)
        positions, sign = a.rules.positions, 1 if a.rules.p2c_index == "released" else -1
        self.c2p = self.p2c = None
        if a.pos_key is not None:  # along a score row distances fall
            self.c2p = Table.lay_out(a.pos_key, positions.slots(-rising), dtype, falling=True)
        if a.pos_query is not None:  # along a score column they rise
            slots = positions.slots(sign * rising)
            self.p2c = Table.lay_out(
                a.pos_query, slots, dtype, factor=a.rules.scale, falling=sign < 0
            )
        strip = min(STRIP, self._length)
        self.largest_product = strip * (self._length + strip)

    def add_to(self, scores: Tensor, q: Tensor, k: Tensor, block: ScoreBlock) -> None:
        """Adds the terms to a block of scores.

        Args:
            scores: ``[rows, queries, k_len]``.
            q: scaled queries ``[rows, queries, head_dim]``.
            k: keys ``[rows, k_len, head_dim]``.
            block: where the block lies.
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
        """Adds the terms' gradients to those of the block's queries, keys and the tables.

        Args:
            d_scores: gradient of the scores ``[rows, queries, k_len]``.
            q: scaled queries ``[rows, queries, head_dim]``.
            k: keys ``[rows, k_len, head_dim]``.
            d_q: gradient of the scaled queries.
            d_k: gradient of the keys.
            block: where the block lies.
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
        """Gradients of one strip's product: of its vectors ``x`` and of the table's window."""
        d_strip, x_strip = d_scores[:, strip], x[:, strip]
        rows, size, length = d_strip.shape
        # Only the diagonals are ever written, so what lies outside them stays zero.
        d_product = self._scratch.get(name + " gradient", rows, size, window.stop - window.start)
        _diagonals(d_product, length).copy_(d_strip)
        d_x[:, strip].baddbmm_(d_product, table.rows[head, window].expand(rows, -1, -1))
        flat = d_product.view(rows * size, -1)
        table.gradient()[head, window].addmm_(flat.t(), x_strip.reshape(rows * size, -1))

    def _product(self, name: str, x: Tensor, window: Tensor) -> Tensor:
        """``[rows, size, columns]`` products of vectors with a window of a table."""
        rows, size, _ = x.shape
        out = self._scratch.get(name, rows, size, window.shape[0])
        return torch.bmm(x, window.t().expand(rows, -1, -1), out=out)

    def _query_strips(self, block: ScoreBlock) -> Iterator[tuple[slice, slice]]:
        """Strips of queries (within the block) and their windows of the c2p table."""
        first, last = block.queries.start, block.queries.stop
        for start in range(first, last, STRIP):
            stop = min(start + STRIP, last)
            window = slice(self._length - stop, 2 * self._length - 1 - start)
            yield slice(start - first, stop - first), window

    def _key_strips(self, block: ScoreBlock) -> Iterator[tuple[slice, slice]]:
        """Strips of keys and their windows of the p2c table."""
        first, last = block.queries.start, block.queries.stop
        for start in range(0, self._length, STRIP):
            stop = min(start + STRIP, self._length)
            window = slice(self._length + first - stop, self._length + last - start - 1)
            yield slice(start, stop), window


class GatheredTerms:
    """Position terms where every query says where it stands."""

    def __init__(
        self, a: AttentionArguments, dtype: torch.dtype, scratch: Scratch, at: Tensor
    ) -> None:
        """Lays both tables out by slot or by distance.

        Args:
            a: checked arguments.
            dtype: in which scores are computed.
            scratch: buffers of the call.
            at: where the queries stand, int64 ``[batch, q_len]``.
        """
        self._at, self._length, self._scratch = at, a.k.shape[2], scratch
        self._positions = a.rules.positions
        self._sign = 1 if a.rules.p2c_index == "released" else -1
        distances = 2 * self._length - 1
        # By slot there are fewer columns for long rows; by distance no two keys of a query share
        # a column, so sums with CUDA's atomics come out the same each time.
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
        self._point_at(block)
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
        self._point_at(block)
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

    def _point_at(self, block: ScoreBlock) -> None:
        """Finds the columns of a block's distances; the heads of a block share them."""
        if self._cached == (block.rows, block.queries):
            return
        at = self._at[block.rows, block.queries]
        # Padding queries (-1) are masked elsewhere; any distance in range does for them.
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
    """View ``[rows, size, length]`` of element ``[r, x, j + size - 1 - x]`` of a product."""
    rows, size, columns = product.shape
    strides = (size * columns, columns - 1, 1)
    return product.as_strided((rows, size, length), strides, product.storage_offset() + size - 1)

"""Disentangled attention in batched products over heads; memory O(length x block).

For GPUs without the fused kernels, such as V100. A block is some batch rows, some queries, all
heads and all keys. Operands of products have the input's dtype, so that fp16 runs on tensor cores;
sums are float32 (float64 for float64 inputs), and so are scores, softmax and sums of gradients.
Position terms, probabilities and gradients of scores are rounded to the input's dtype where they
leave or enter a product. The formulas are those of `megatron_deberta.ops.chunked`; no block is
kept. Gathers replace scatters, so that gradients are deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from megatron_deberta.ops.arguments import (
    AttentionArguments,
    hides_keys,
    query_positions,
    score_dtype,
    visible_keys,
)
from megatron_deberta.ops.dropout_bits import (
    consecutive_keep,
    drop_threshold,
    gathered_keep,
    keep_scale,
    pairs,
    pairs_of,
    row_keys,
)
from megatron_deberta.ops.position_terms import STRIP, Scratch, Table, diagonals, linear_tables

BLOCK_ELEMENTS = 1 << 25
"""Scores per block."""


def product_(out: Tensor, a: Tensor, b: Tensor, *, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """Compute ``out = beta out + alpha a @ b`` in place, with sums in at least float32.

    Args:
        out: ``[n, x, z]``, of the operands' dtype or float32.
        a: ``[n, x, y]``.
        b: ``[n, y, z]``.
        beta: 0 overwrites ``out``, whatever it contains.
        alpha: applied before rounding.
    """
    if out.dtype == a.dtype:
        return torch.baddbmm(out, a, b, beta=beta, alpha=alpha, out=out)
    if a.is_cuda and hasattr(torch.ops.aten.baddbmm, "dtype_out"):  # torch 2.8 and newer
        torch.ops.aten.baddbmm.dtype_out(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)
        return out
    if a.is_meta:  # No values: counts of memory should not contain the conversions below.
        return out
    return torch.baddbmm(out, a.to(out), b.to(out), beta=beta, alpha=alpha, out=out)


def strip_size(scores: int) -> int:
    """Return how many vectors, with ``scores`` scores each, are multiplied by a table at once."""
    return max(STRIP, scores // 4)


def block_size(heads: int, rows: int, queries: int, length: int) -> tuple[int, int]:
    """Return the rows and the queries of a block.

    Args:
        heads: local heads.
        rows: of the batch.
        queries: of each row.
        length: keys of each row.
    """
    of_row = _equal_parts(queries, BLOCK_ELEMENTS // max(1, heads * length))
    return _equal_parts(rows, BLOCK_ELEMENTS // max(1, heads * of_row * length)), of_row


def _equal_parts(count: int, limit: int) -> int:
    """Return the size of as few parts of equal size as a limit allows, at least 1."""
    parts = max(1, -(-count // max(1, limit)))
    return max(1, -(-count // parts))


class _Strip(NamedTuple):
    """Vectors of a block (queries or keys) and the columns of the table they are multiplied by.

    Attributes:
        vectors: of the block.
        columns: of the table.
        diagonals: length of the product's diagonals, which are read; 0: its rows are read.
        reads: int64 ``[rows, vectors or 1, scores]``, of each score in what is read; None: all in
            order.
        inverse: int64 ``[rows, vectors, size of what is read]``: the score that reads each element.
        is_read: bool like ``inverse``: whether there is such a score.
        spread: ``[heads * rows, scores, size of what is read]``, 1 where a score reads an element,
            else 0, where several scores may read the same.
    """

    vectors: slice
    columns: slice
    diagonals: int = 0
    reads: Tensor | None = None
    inverse: Tensor | None = None
    is_read: Tensor | None = None
    spread: Tensor | None = None

    def view(self, product: Tensor) -> Tensor:
        """Return the used elements of a product ``[heads * rows, vectors, columns]``."""
        return diagonals(product, self.diagonals) if self.diagonals else product

    def values(self, product: Tensor) -> Tensor:
        """Return the scores ``[heads * rows, vectors, scores]`` in a product."""
        return _gather(self.view(product), self.reads)

    def put_gradient(self, d_scores: Tensor, d_product: Tensor) -> None:
        """Write the gradient of a product; outside of diagonals it is left as it is.

        Args:
            d_scores: ``[heads * rows, vectors, scores]``.
            d_product: ``[heads * rows, vectors, columns]``.
        """
        values = _gather(d_scores, self.inverse)
        if self.is_read is not None:
            values = values.unflatten(0, (-1, len(self.is_read)))
            values = values.masked_fill_(~self.is_read, 0.0).flatten(0, 1)
        if self.spread is not None:
            values = torch.bmm(values, self.spread)
        self.view(d_product).copy_(values)


def _gather(x: Tensor, index: Tensor | None) -> Tensor:
    """Gather the last dimension of ``[heads * rows, n, m]`` by ``[rows, n or 1, k]``."""
    if index is None:
        return x
    by_head = x.unflatten(0, (-1, len(index)))
    return cast(Tensor, by_head.gather(-1, index.expand(*by_head.shape[:-1], -1)).flatten(0, 1))


def dropout_keys(a: AttentionArguments) -> Tensor | None:
    """Return ``row_keys`` of the pairs of consecutive queries, or of each gathered query's pair.

    Args:
        a: arguments of the call; None is returned without dropout.
    """
    if a.seed is None:
        return None
    if a.q_positions is None:
        at = torch.arange(pairs_of(slice(0, a.q.shape[2])).stop, device=a.q.device)
    else:
        at = pairs(query_positions(a))
    return row_keys(a.seed, at, a.q.shape[1], a.head_offset)


class Block:
    """Masks and strips of some batch rows and queries of a call."""

    def __init__(self, call: Call, rows: slice, queries: slice) -> None:
        a = call.a
        self.rows, self.queries, self.length = rows, queries, a.k.shape[2]
        at = call.at[rows, queries] if call.at.shape[0] > 1 else call.at[:, queries]
        self.hidden: Tensor | None = None
        self.fully_masked: Tensor | None = None
        if hides_keys(a):
            self.hidden = ~visible_keys(a, at, rows)
            self.fully_masked = self.hidden.all(-1, keepdim=True)
        self.keep: Tensor | None = None
        if call.row_keys is not None:
            by_head = call.row_keys[rows].transpose(0, 1)
            threshold = drop_threshold(a.dropout_p)
            if a.q_positions is None:
                at_pairs = by_head[:, :, pairs_of(queries)]
                keep = consecutive_keep(at_pairs, queries, self.length, threshold)
            else:
                keep = gathered_keep(by_head[:, :, queries], at, self.length, threshold)
            self.keep = keep.flatten(0, 1)
        # Padding queries (-1) are masked elsewhere; any position is valid for them.
        self.at = None if a.q_positions is None else at.clamp(min=0)
        self.heads, self.dtype = call.heads, a.q.dtype

    def strips(self, term: str) -> Iterator[_Strip]:
        """Yield strips of the block's queries for ``c2p``, of all keys for ``p2c``."""
        if term == "c2p":
            return self._query_strips()
        return self._key_strips()

    def _query_strips(self) -> Iterator[_Strip]:
        first, last, length = self.queries.start, self.queries.stop, self.length
        size = strip_size(length)
        for start in range(first, last, size):
            stop = min(start + size, last)
            vectors = slice(start - first, stop - first)
            if self.at is None:
                columns = slice(length - stop, 2 * length - 1 - start)
                yield _Strip(vectors, columns, length)
                continue
            # Column t stands for key t + at - (length - 1).
            shift = (length - 1 - self.at[:, vectors])[:, :, None]
            column = torch.arange(2 * length - 1, device=shift.device)
            inverse = column - shift
            yield _Strip(
                vectors,
                slice(0, 2 * length - 1),
                0,
                column[:length] + shift,
                inverse.clamp(0, length - 1),
                (inverse >= 0) & (inverse < length),
            )

    def _key_strips(self) -> Iterator[_Strip]:
        length = self.length
        index = spread = None
        first, last = self.queries.start, self.queries.stop
        if self.at is not None:
            # The terms of queries at all positions, of which those at hand are read.
            first, last = 0, length
            index = self.at[:, None]
            is_at = self.at[:, :, None] == torch.arange(length, device=self.at.device)
            spread = is_at.to(self.dtype).expand(self.heads, -1, -1, -1).flatten(0, 1)
        size = strip_size(last - first)
        for start in range(0, length, size):
            stop = min(start + size, length)
            columns = slice(length + first - stop, length + last - start - 1)
            yield _Strip(slice(start, stop), columns, last - first, index, None, None, spread)


class Call:
    """State that the blocks of a call share.

    Vectors are ``[heads * rows, n, head_dim]``, scores ``[heads * rows, queries, k_len]``.
    """

    def __init__(self, a: AttentionArguments) -> None:
        self.a, self.wide = a, score_dtype(a)
        batch, self.heads, q_len, _ = a.q.shape
        self.length = a.k.shape[2]
        self.block_rows, self.block_queries = block_size(self.heads, batch, q_len, self.length)
        self.at = query_positions(a)
        self.row_keys = dropout_keys(a)
        self.scratch = Scratch(a.q, a.q.dtype)
        self.c2p, self.p2c = linear_tables(a, a.q.dtype)

    def row_slices(self) -> Iterator[slice]:
        """Yield the batch rows of consecutive blocks."""
        batch, rows = len(self.a.q), self.block_rows
        return (slice(at, min(at + rows, batch)) for at in range(0, batch, rows))

    def blocks(self, rows: slice) -> Iterator[Block]:
        """Yield the blocks of some batch rows."""
        q_len, queries = self.a.q.shape[2], self.block_queries
        for at in range(0, q_len, queries):
            yield Block(self, rows, slice(at, min(at + queries, q_len)))

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialized tensor of the input's dtype."""
        return self.a.q.new_empty(shape, dtype=dtype)

    def split(self, x: Tensor, vectors: slice) -> Tensor:
        """Return vectors ``[heads, rows * n, head_dim]`` of ``[heads * rows, ...]``, a copy."""
        return cast(Tensor, x.unflatten(0, (self.heads, -1))[:, :, vectors].flatten(1, 2))

    def probabilities(self, q: Tensor, k: Tensor, block: Block, lse: Tensor | None) -> Tensor:
        """Return the softmax of the scores.

        Args:
            q: queries of the block.
            k: keys of its rows.
            block: the block.
            lse: ``[rows, heads, queries]``, overwritten by the log-sum-exp; None: not wanted.
        """
        scores = self.new(len(q), q.shape[1], self.length, dtype=self.wide)
        product_(scores, q, k.transpose(1, 2), alpha=self.a.scale)
        self.add_terms(scores, q, k, block)
        by_head = scores.unflatten(0, (self.heads, -1))
        if block.hidden is not None:
            by_head.masked_fill_(block.hidden, torch.finfo(self.wide).min)
        if lse is not None:
            value = torch.logsumexp(by_head, -1).transpose(0, 1)
            if block.fully_masked is not None:
                value = value.masked_fill(block.fully_masked.transpose(1, 2), float("-inf"))
            lse.copy_(value)
        return torch.softmax(scores, -1, out=scores)

    def add_terms(
        self, scores: Tensor, q: Tensor, k: Tensor, block: Block, *, overwrite: bool = False
    ) -> None:
        """Add the position terms times the scale.

        Args:
            scores: ``[heads * rows, queries, k_len]``, of any dtype.
            q: queries of the block.
            k: keys of its rows.
            block: the block.
            overwrite: the first term overwrites the scores.
        """
        for name, table, vectors, by_vector in self._terms((q, k), scores):
            for strip in block.strips(name):
                rows = table.rows[:, strip.columns].transpose(1, 2)
                chosen = self.split(vectors, strip.vectors)
                product = self.new(self.heads, chosen.shape[1], rows.shape[2])
                product_(product, chosen, rows, alpha=self.a.scale)
                part = by_vector[:, strip.vectors]
                values = strip.values(product.view(len(part), part.shape[1], -1))
                part.copy_(values) if overwrite else part.add_(values)
            overwrite = False

    def kept(self, probabilities: Tensor, block: Block) -> Tensor:
        """Return the probabilities after dropout, before its scale, in the input's dtype."""
        if block.keep is None:
            return probabilities.to(self.a.q.dtype)
        return torch.mul(probabilities, block.keep, out=self.new(*probabilities.shape))

    def add_gradients(
        self, d_scores: Tensor, vectors: tuple[Tensor, Tensor], grads: list[Tensor], block: Block
    ) -> None:
        """Add the position terms' gradients.

        Args:
            d_scores: in the input's dtype.
            vectors: queries and keys.
            grads: of the queries and keys, added to.
            block: the block.
        """
        d_q, d_k = grads
        for name, table, x, by_vector in self._terms(vectors, d_scores):
            d_x = (d_q if name == "c2p" else d_k).unflatten(0, (self.heads, -1))
            for strip in block.strips(name):
                part, rows = by_vector[:, strip.vectors], table.rows[:, strip.columns]
                # Only diagonals are ever written: the rest stays zero.
                buffer = self.scratch.get(name, *part.shape[:2], rows.shape[1])
                strip.put_gradient(part, buffer)
                d_product = buffer.view(self.heads, -1, rows.shape[1])
                d_part = self.new(*d_product.shape[:2], rows.shape[2], dtype=self.wide)
                product_(d_part, d_product, rows, alpha=self.a.scale)
                target = d_x[:, :, strip.vectors]
                target += d_part.view(target.shape)
                product_(
                    table.gradient(self.wide)[:, strip.columns],
                    d_product.transpose(1, 2),
                    self.split(x, strip.vectors),
                    beta=1.0,
                    alpha=self.a.scale,
                )

    def _terms(
        self, vectors: tuple[Tensor, Tensor], scores: Tensor
    ) -> Iterator[tuple[str, Table, Tensor, Tensor]]:
        """Yield each term's name, table, vectors and the scores with these vectors as rows."""
        if self.c2p is not None:
            yield "c2p", self.c2p, vectors[0], scores
        if self.p2c is not None:
            yield "p2c", self.p2c, vectors[1], scores.transpose(1, 2)

    def table_gradients(self) -> list[Tensor | None]:
        """Return the gradients of the position tables."""
        for table in (self.c2p, self.p2c):
            if table is not None:
                table.gradient(self.wide)
        return [
            None if table is None else table.folded_gradient().to(self.a.q.dtype)
            for table in (self.c2p, self.p2c)
        ]


def heads_first(x: Tensor, rows: slice, queries: slice = slice(None)) -> Tensor:
    """Return some rows with heads first, ``[heads * rows, n, head_dim]``.

    Args:
        x: ``[batch, heads, length, head_dim]``.
        rows: of the batch.
        queries: positions to return.
    """
    return x[rows, :, queries].transpose(0, 1).flatten(0, 1)


def rows_first(x: Tensor, heads: int) -> Tensor:
    """Return ``[rows, heads, n, head_dim]`` of ``[heads * rows, n, head_dim]``."""
    return cast(Tensor, x.unflatten(0, (heads, -1)).transpose(0, 1))


def forward(a: AttentionArguments) -> tuple[Tensor, Tensor | None]:
    """Compute attention.

    Args:
        a: checked arguments.

    Returns:
        Output like ``q``, and if requested the log-sum-exp of the scores, float32
        ``[batch, heads, q_len]``.
    """
    call, factor = Call(a), keep_scale(a.dropout_p)
    output = torch.empty_like(a.q)
    lse = a.q.new_empty(a.q.shape[:3], dtype=torch.float32) if a.return_lse else None
    for rows in call.row_slices():
        k, v = (heads_first(x, rows) for x in (a.k, a.v))
        for block in call.blocks(rows):
            q = heads_first(a.q, rows, block.queries)
            part = None if lse is None else lse[rows, :, block.queries]
            kept = call.kept(call.probabilities(q, k, block, part), block)
            mixed = rows_first(product_(call.new(*q.shape), kept, v, alpha=factor), call.heads)
            if block.fully_masked is not None:
                mixed = mixed.masked_fill(block.fully_masked[:, None], 0.0)
            output[rows, :, block.queries] = mixed
    return output, lse


def backward(a: AttentionArguments, d_output: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, pos_key and pos_query.

    Args:
        a: checked arguments.
        d_output: gradient of the output, ``[batch, heads, q_len, head_dim]``.
    """
    call = Call(a)
    d_q, d_k, d_v = (torch.empty_like(x) for x in (a.q, a.k, a.v))
    for rows in call.row_slices():
        k, v = (heads_first(x, rows) for x in (a.k, a.v))
        sums = [torch.zeros_like(x, dtype=call.wide) for x in (k, v)]
        for block in call.blocks(rows):
            d_block = _backward_block(call, block, (k, v), d_output, sums)
            d_q[rows, :, block.queries] = rows_first(d_block, call.heads)
        for grad, total in zip((d_k, d_v), sums, strict=True):
            grad[rows] = rows_first(total, call.heads)
    return d_q, d_k, d_v, *call.table_gradients()


def _backward_block(
    call: Call, block: Block, kv: tuple[Tensor, Tensor], d_output: Tensor, sums: list[Tensor]
) -> Tensor:
    """Return the gradient of a block's queries; add to those of keys, values and tables.

    Args:
        call: the call.
        block: the block.
        kv: keys and values of its rows.
        d_output: gradient of the output of all rows.
        sums: gradients of ``kv`` in the dtype of the scores.
    """
    a, (k, v), (d_k, d_v) = call.a, kv, sums
    factor = keep_scale(a.dropout_p)
    q, d_o = (heads_first(x, block.rows, block.queries) for x in (a.q, d_output))
    if block.fully_masked is not None:
        by_head = d_o.unflatten(0, (call.heads, -1))
        d_o = by_head.masked_fill(block.fully_masked, 0.0).flatten(0, 1)
    probabilities = call.probabilities(q, k, block, None)
    product_(d_v, call.kept(probabilities, block).transpose(1, 2), d_o, beta=1.0, alpha=factor)
    wide = call.new(*probabilities.shape, dtype=call.wide)
    product_(wide, d_o, v.transpose(1, 2), alpha=factor).mul_(probabilities)
    if block.keep is not None:
        wide.mul_(block.keep)
    total = wide.sum(-1, keepdim=True)
    d_scores = wide if wide.dtype == q.dtype else call.new(*wide.shape)
    torch.addcmul(wide, probabilities, total, value=-1, out=d_scores)
    d_q = product_(call.new(*q.shape, dtype=call.wide), d_scores, k, alpha=a.scale)
    product_(d_k, d_scores.transpose(1, 2), q, beta=1.0, alpha=a.scale)
    call.add_gradients(d_scores, (q, k), [d_q, d_k], block)
    return d_q

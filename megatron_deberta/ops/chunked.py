"""Disentangled attention in blocks, forward and backward; memory O(length x block).

For devices without the fused kernels. A block is some batch rows, some queries and all keys. No
block is kept; backward recomputes the scores and, as a function of position, the dropout bits. With
S the scores, P = softmax(S), M the dropout mask, s its scale and o the output::

    o = s (P * M) v                          dv += s (P * M)^T do
    G = P * M * (s do v^T)                   dS = G - P rowsum(G)

On the CPU, where the slow twin of the compiled kernels runs, a block is one head, small enough to
stay in cache, in float32 (float64 for float64 inputs); each thread computes a share of the heads.
On a GPU, such as V100, it is all heads, and operands of products have the input's dtype, so that
fp16 runs on tensor cores; scores, softmax and sums are float32 there, and position terms,
probabilities and gradients of scores are rounded to the input's dtype where they leave or enter a
product. Gathers replace scatters on a GPU, so that gradients are deterministic.

If queries are consecutive, neighbouring elements of a score row are neighbouring distances, so a
product of queries with the position table in linear form (one row per distance) holds the whole
term on its diagonals::

    product[x, t] = q_x . table[t],  t = j + (size - 1 - x)   =>   term[x, j] = product[x, t(x, j)]

and a strided view reads it without a gather (`diagonals`). Gathered queries stand at arbitrary
positions; their terms are gathered from a product with the table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_deberta.ops.arguments import (
    AttentionArguments,
    hides_keys,
    query_positions,
    score_dtype,
    visible_keys,
)
from megatron_deberta.ops.dropout_bits import (
    consecutive_bytes,
    consecutive_keep,
    drop_threshold,
    gathered_bytes,
    gathered_keep,
    keep_scale,
    pairs,
    pairs_of,
    row_keys,
)

CACHE_ELEMENTS = 1 << 18
"""Scores per block of one head. A few buffers of this size fit a core's second-level cache."""
BLOCK_ELEMENTS = 1 << 25
"""Scores per block of all heads."""
STRIP = 128
"""Queries (keys) multiplied at once by a window of the c2p (p2c) table, at least. A window is
longer than the distances of a query by this much: larger strips waste arithmetic, smaller ones take
more calls."""
_KEY_STRIP = 2048
"""Keys multiplied at once by the p2c table for gathered queries; bounds memory on long rows."""
_THREAD_COUNT = threading.Lock()
"""Guards torch's number of threads, which is global to the process."""
_MIN_SCORES_PER_THREAD = 1 << 16
"""With fewer scores a thread costs more than it saves."""


def takes_all_heads(device: torch.device) -> bool:
    """Return whether a block is all heads, rather than one, in threads of the CPU."""
    return device.type != "cpu"


def for_heads(work: Callable[[slice], None], heads: int, scores: int, device: str) -> None:
    """Call ``work`` for slices that cover all heads, on the CPU in parallel.

    Torch's intra-op parallelism synchronises its threads hundreds of times per attention call. On
    cores shared with other processes each of these can cost a time slice, which made attention up
    to fifty times slower. Heads are independent, so here threads synchronise once, at the end, and
    a head's arithmetic does not depend on the number of threads.

    Args:
        work: computes a slice of heads; runs without autograd.
        heads: number of heads.
        scores: number of scores of all heads, which limits the number of threads.
        device: device type of the tensors.

    Raises:
        Exception: raised by ``work``.
    """
    threads = torch.get_num_threads() if device == "cpu" else 1
    workers = min(threads, heads, max(1, scores // _MIN_SCORES_PER_THREAD))
    if workers < 2:
        work(slice(0, heads))
        return
    inference = torch.is_inference_mode_enabled()

    def share(worker: int) -> None:
        # Threads start with torch's defaults: gradients on, every operation on all cores.
        torch.set_num_threads(threads // workers)
        with torch.inference_mode() if inference else torch.no_grad():
            work(slice(worker * heads // workers, (worker + 1) * heads // workers))

    with _THREAD_COUNT:
        try:
            with ThreadPoolExecutor(workers) as pool:
                for _ in pool.map(share, range(workers)):
                    pass
        finally:
            torch.set_num_threads(threads)


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
    """Return how many vectors of all heads, with ``scores`` scores each, form a strip."""
    return max(STRIP, scores // 4)


def block_size(
    heads: int, rows: int, queries: int, length: int, limit: int | None = None, product: int = 0
) -> tuple[int, int]:
    """Return the rows and the queries of a block.

    Args:
        heads: of the block.
        rows: of the batch.
        queries: of each row.
        length: keys of each row.
        limit: scores per block; None: ``BLOCK_ELEMENTS``.
        product: elements of a row's largest product with a table, which count like its scores.
    """
    limit = BLOCK_ELEMENTS if limit is None else limit
    of_row = _equal_parts(queries, limit // max(1, heads * length))
    return _equal_parts(rows, limit // max(1, heads * of_row * length, product)), of_row


def _equal_parts(count: int, limit: int) -> int:
    """Return the size of as few parts of equal size as a limit allows, at least 1."""
    parts = max(1, -(-count // max(1, limit)))
    return max(1, -(-count // parts))


def diagonals(product: Tensor, length: int) -> Tensor:
    """Return ``[rows, size, length]``, a view of a product's elements [r, x, j + size - 1 - x]."""
    rows, size, columns = product.shape
    strides = (size * columns, columns - 1, 1)
    return product.as_strided((rows, size, length), strides, product.storage_offset() + size - 1)


class Table(NamedTuple):
    """A position table of one call, one row per column of the products, and its gradient."""

    rows: Tensor
    """``[heads, columns, head_dim]``"""
    slots: Tensor
    """int64 ``[columns]``, the slot of each row, monotonic."""
    falling: bool
    """Whether the slots decrease."""
    grad: Tensor | None
    """Like ``rows``, in the dtype of the scores; None in forward."""

    def of_length(self, length: int) -> Table:
        """Return the part for consecutive queries of shorter rows; the gradient is shared."""
        first = (len(self.slots) - (2 * length - 1)) // 2
        columns = slice(first, first + 2 * length - 1)
        grad = None if self.grad is None else self.grad[:, columns]
        return Table(self.rows[:, columns], self.slots[columns], self.falling, grad)

    def folded_gradient(self, like: Tensor) -> Tensor:
        """Sum the gradients of the rows of each slot in a fixed order.

        Args:
            like: the table, ``[heads, slots, head_dim]``.
        """
        assert self.grad is not None
        by_column = self.grad.transpose(0, 1)
        by_column = by_column.flip(0) if self.falling else by_column.contiguous()
        ordered = self.slots.flip(0) if self.falling else self.slots
        bounds = torch.arange(like.shape[1] + 1, device=ordered.device)
        lengths = torch.searchsorted(ordered.contiguous(), bounds).diff()
        # "unsafe" only skips a check of the lengths, which would synchronise with the device.
        folded = torch.segment_reduce(by_column, "sum", lengths=lengths, unsafe=True)
        return folded.transpose(0, 1).to(like.dtype)


class Tables(NamedTuple):
    """The two position tables of a call; None: without that term."""

    c2p: Table | None
    p2c: Table | None


def position_tables(a: AttentionArguments, *, gradients: bool = False) -> Tables:
    """Lay out the position tables of a call.

    Args:
        a: checked arguments.
        gradients: with zeros for their gradients.
    """
    length, device = a.k.shape[2], a.q.device
    distance = torch.arange(1 - length, length, device=device)
    p2c_sign = -1 if a.p2c_index == "paper" else 1
    if a.q_positions is None or takes_all_heads(device):
        # Distances decrease along a score row and increase along a score column.
        c2p, p2c = (-distance, True), (p2c_sign * distance, p2c_sign < 0)
    else:
        c2p = p2c = distance, False
    wide = score_dtype(a)

    def lay_out(table: Tensor | None, distances: Tensor, falling: bool) -> Table | None:
        if table is None:
            return None
        slots = a.positions.slots(distances)
        if a.q_positions is not None and _is_by_slot(a):
            slots = torch.arange(table.shape[1], device=device)
        rows = table.to(_operand_dtype(a)).index_select(1, slots)
        grad = torch.zeros_like(rows, dtype=wide) if gradients else None
        return Table(rows, slots, falling, grad)

    return Tables(lay_out(a.pos_key, *c2p), lay_out(a.pos_query, *p2c))


def _is_by_slot(a: AttentionArguments) -> bool:
    """Return whether the tables of gathered queries have a column per slot, not per distance.

    For long rows these are fewer. No two keys of a query share a distance, so only with distances
    could sums be deterministic on a GPU.
    """
    return not takes_all_heads(a.q.device) and 2 * a.positions.span < 2 * a.k.shape[2] - 1


def _operand_dtype(a: AttentionArguments) -> torch.dtype:
    return a.q.dtype if takes_all_heads(a.q.device) else score_dtype(a)


class _Strip(NamedTuple):
    """Vectors of a block (queries or keys) and the columns of the table they are multiplied by."""

    vectors: slice
    columns: slice
    diagonals: int = 0
    """Length of the product's diagonals, which are read; 0: its rows are read."""
    reads: Tensor | None = None
    """int64 ``[rows, vectors or 1, scores]``, of each score in what is read; None: all in order."""
    scatters: bool = False
    """The gradient of what is read is scattered, on the CPU; else one of these is used."""
    inverse: Tensor | None = None
    """int64 ``[rows, vectors, size of what is read]``: the score that reads each element."""
    is_read: Tensor | None = None
    """bool like ``inverse``: whether there is such a score."""
    spread: Tensor | None = None
    """``[heads * rows, scores, size of what is read]``, 1 where a score reads an element, else 0,
    where several scores may read the same."""

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
        if self.scatters and self.reads is not None:
            d_product.zero_().scatter_add_(-1, self.reads, d_scores)
            return
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


class _Block:
    """Masks and strips of some batch rows and queries of a call, shared by its heads."""

    def __init__(self, call: Call, rows: slice, queries: slice) -> None:
        self.rows, self.queries, self._call = rows, queries, call
        self.at = call.at[rows, queries] if call.at.shape[0] > 1 else call.at[:, queries]
        self.hidden: Tensor | None = None
        self.fully_masked: Tensor | None = None
        if hides_keys(call.a):
            self.hidden = ~visible_keys(call.a, self.at, rows)
            self.fully_masked = self.hidden.all(-1, keepdim=True)
        if call.a.q_positions is None:
            self.c2p, self.p2c = list(self._query_strips()), list(self._key_strips())
            return
        # Padding queries (-1) are masked elsewhere; any position is valid for them.
        at = self.at.clamp(min=0)
        if call.all_heads:
            self.c2p, self.p2c = list(self._gathered_queries(at)), list(self._keys_of_gathered(at))
        else:
            self.c2p, self.p2c = self._scattered(at)

    def _query_strips(self) -> Iterator[_Strip]:
        first, last, length = self.queries.start, self.queries.stop, self._call.length
        size = self._call.strip_size(length)
        for start in range(first, last, size):
            stop = min(start + size, last)
            columns = slice(length - stop, 2 * length - 1 - start)
            yield _Strip(slice(start - first, stop - first), columns, length)

    def _key_strips(self) -> Iterator[_Strip]:
        for vectors, columns in self._key_windows(self.queries.start, self.queries.stop):
            yield _Strip(vectors, columns, self.queries.stop - self.queries.start)

    def _key_windows(self, first: int, last: int) -> Iterator[tuple[slice, slice]]:
        """Yield strips of the keys with their columns for the queries at some positions."""
        length, size = self._call.length, self._call.strip_size(last - first)
        for start in range(0, length, size):
            stop = min(start + size, length)
            yield slice(start, stop), slice(length + first - stop, length + last - start - 1)

    def _gathered_queries(self, at: Tensor) -> Iterator[_Strip]:
        length, count = self._call.length, at.shape[1]
        size = self._call.strip_size(length)
        column = torch.arange(2 * length - 1, device=at.device)
        for start in range(0, count, size):
            vectors = slice(start, min(start + size, count))
            # Column t stands for key t + at - (length - 1).
            shift = (length - 1 - at[:, vectors])[:, :, None]
            inverse = column - shift
            yield _Strip(
                vectors,
                slice(0, 2 * length - 1),
                reads=column[:length] + shift,
                inverse=inverse.clamp(0, length - 1),
                is_read=(inverse >= 0) & (inverse < length),
            )

    def _keys_of_gathered(self, at: Tensor) -> Iterator[_Strip]:
        # The terms of queries at all positions, of which those at hand are read.
        length, heads = self._call.length, self._call.heads
        is_at = at[:, :, None] == torch.arange(length, device=at.device)
        spread = is_at.to(self._call.dtype).expand(heads, -1, -1, -1).flatten(0, 1)
        for vectors, columns in self._key_windows(0, length):
            yield _Strip(vectors, columns, length, at[:, None], spread=spread)

    def _scattered(self, at: Tensor) -> tuple[list[_Strip], list[_Strip]]:
        a, length = self._call.a, self._call.length
        distance = at[:, :, None] - torch.arange(length, device=at.device)
        sign = -1 if a.p2c_index == "paper" else 1

        def columns(distance: Tensor) -> Tensor:
            return a.positions.slots(distance) if _is_by_slot(a) else distance + length - 1

        every = slice(None)
        of_keys = columns((sign * distance).transpose(1, 2).contiguous())
        starts = range(0, length, _KEY_STRIP)
        keys = [slice(start, min(start + _KEY_STRIP, length)) for start in starts]
        return (
            [_Strip(every, every, reads=columns(distance), scatters=True)],
            [_Strip(part, every, reads=of_keys[:, part], scatters=True) for part in keys],
        )


class _Heads(NamedTuple):
    """Keys and values ``[heads * rows, k_len, head_dim]`` of some rows and heads of a call."""

    heads: slice
    k: Tensor
    v: Tensor


class Call:
    """A call for some heads, and the state that its blocks share.

    Vectors are ``[heads * rows, n, head_dim]``, scores ``[heads * rows, queries, k_len]``, with
    the heads of a block: all, or one.

    Args:
        a: checked arguments.
        tables: of rows that are at least as long, with consecutive queries, whose gradients are
            shared; None: laid out for this call.
        gradients: prepare the gradients of the tables that are laid out.
    """

    def __init__(
        self, a: AttentionArguments, tables: Tables | None = None, *, gradients: bool = False
    ) -> None:
        self.a, self.wide, self.dtype = a, score_dtype(a), _operand_dtype(a)
        self.length, self.all_heads = a.k.shape[2], takes_all_heads(a.q.device)
        self.heads = a.q.shape[1] if self.all_heads else 1
        self.at = query_positions(a)
        self.row_keys: Tensor | None = None
        if a.seed is not None:
            # Of the pairs of consecutive queries, or of each gathered query.
            at = pairs(self.at)
            if a.q_positions is None:
                at = torch.arange(pairs_of(slice(0, a.q.shape[2])).stop, device=a.q.device)
            self.row_keys = row_keys(a.seed, at, a.q.shape[1], a.head_offset)
        self._scratch: dict[tuple[Any, ...], Tensor] = {}
        if tables is None:
            self.tables = position_tables(a, gradients=gradients)
        else:
            self.tables = Tables(
                *(None if table is None else table.of_length(self.length) for table in tables)
            )

    def strip_size(self, scores: int) -> int:
        """Return how many vectors with ``scores`` scores each are multiplied by a table at once."""
        return strip_size(scores) if self.all_heads else STRIP

    def _block_size(self) -> tuple[int, int]:
        batch, heads, q_len, _ = self.a.q.shape
        if self.all_heads:
            return block_size(heads, batch, q_len, self.length)
        strip = min(STRIP, self.length)
        columns = self.length + strip
        if self.a.q_positions is not None:
            strip = min(_KEY_STRIP, self.length)
            columns = max((len(table.slots) for table in self.tables if table), default=0)
        return block_size(1, batch, q_len, self.length, CACHE_ELEMENTS, strip * columns)

    def blocks(self) -> Iterator[tuple[slice, list[_Heads], Iterator[_Block]]]:
        """Yield batch rows, with their keys and values by heads, and blocks of their queries."""
        batch, heads, q_len, _ = self.a.q.shape
        num_rows, num_queries = self._block_size()
        for row in range(0, batch, num_rows):
            rows = slice(row, min(row + num_rows, batch))
            parts = [slice(head, head + self.heads) for head in range(0, heads, self.heads)]
            keys = [
                _Heads(part, *(self.vectors(x, rows, part) for x in (self.a.k, self.a.v)))
                for part in parts
            ]
            starts = range(0, q_len, num_queries)
            queries = (slice(start, min(start + num_queries, q_len)) for start in starts)
            yield rows, keys, (_Block(self, rows, each) for each in queries)

    def vectors(self, x: Tensor, rows: slice, heads: slice, queries: slice = slice(None)) -> Tensor:
        """Return some of the vectors of a tensor, as operands.

        Args:
            x: ``[batch, heads, n, head_dim]``.
            rows: of the batch.
            heads: of the call.
            queries: of the rows, or keys.

        Returns:
            ``[heads * rows, n, head_dim]``; on the CPU in general a view.
        """
        return x[rows, heads, queries].transpose(0, 1).flatten(0, 1).to(self.dtype)

    def by_row(self, x: Tensor) -> Tensor:
        """Return ``[rows, heads, n, head_dim]`` of ``[heads * rows, n, head_dim]``."""
        return cast(Tensor, x.unflatten(0, (self.heads, -1)).transpose(0, 1))

    def new(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor without values.

        On the CPU it is what the last block named so: most blocks have the same shape.
        """
        if self.all_heads:
            return self.a.q.new_empty(shape, dtype=dtype or self.dtype)
        return self._kept_buffer(name, shape, dtype or self.dtype)

    def _kept_buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous buffer: zeros at first, later as its last user left it."""
        key = (name, shape, dtype)
        if key not in self._scratch:
            self._scratch[key] = self.a.q.new_zeros(shape, dtype=dtype)
        return self._scratch[key]

    def split(self, x: Tensor, vectors: slice) -> Tensor:
        """Return vectors ``[heads, rows * n, head_dim]`` of ``[heads * rows, ...]``."""
        return cast(Tensor, x.unflatten(0, (self.heads, -1))[:, :, vectors].flatten(1, 2))

    def keep(self, block: _Block, heads: slice) -> Tensor | None:
        """Return the dropout mask of a block: bool, or on the CPU 1 and 0 in ``wide``."""
        if self.row_keys is None:
            return None
        threshold = drop_threshold(self.a.dropout_p)
        keys = self.row_keys[block.rows, heads].transpose(0, 1)
        if self.a.q_positions is None:
            keys = keys[:, :, pairs_of(block.queries)]
            if self.all_heads:
                keep = consecutive_keep(keys, block.queries, self.length, threshold)
                return keep.flatten(0, 1)
            random = consecutive_bytes(keys, block.queries, self.length)
        else:
            keys = keys[:, :, block.queries]
            if self.all_heads:
                return gathered_keep(keys, block.at, self.length, threshold).flatten(0, 1)
            random = gathered_bytes(keys, block.at, self.length)
        random = random.flatten(0, 1)
        return torch.ge(random, threshold, out=self.new("keep", *random.shape))

    def kept(self, probabilities: Tensor, keep: Tensor | None) -> Tensor:
        """Return the probabilities after dropout, before its scale, as an operand."""
        if keep is None:
            return probabilities.to(self.dtype)
        return torch.mul(probabilities, keep, out=self.new("kept", *probabilities.shape))

    def probabilities(
        self, q: Tensor, keys: _Heads, block: _Block, lse: Tensor | None = None
    ) -> Tensor:
        """Return the softmax of a block's scores.

        Args:
            q: queries of the block, ``[heads * rows, queries, head_dim]``.
            keys: of its rows and heads.
            block: the block.
            lse: log-sum-exp of the scores, ``[rows, heads, queries]``; written. None: not wanted.

        Returns:
            ``[heads * rows, queries, k_len]``; on the CPU a buffer that the next block overwrites.
        """
        scores = self.new("scores", len(q), q.shape[1], self.length, dtype=self.wide)
        product_(scores, q, keys.k.transpose(1, 2), alpha=self.a.scale)
        for name, table, vectors, by_vector, strips in self._terms((q, keys.k), scores, block):
            for strip in strips:
                rows = table.rows[keys.heads, strip.columns].transpose(1, 2)
                chosen = self.split(vectors, strip.vectors)
                product = self.new(name, self.heads, chosen.shape[1], rows.shape[2])
                product_(product, chosen, rows, alpha=self.a.scale)
                part = by_vector[:, strip.vectors]
                part.add_(strip.values(product.view(len(part), part.shape[1], -1)))
        by_head = scores.unflatten(0, (self.heads, -1))
        if block.hidden is not None:
            by_head.masked_fill_(block.hidden, torch.finfo(self.wide).min)
        if lse is not None:
            value = torch.logsumexp(by_head, -1).transpose(0, 1)
            if block.fully_masked is not None:
                value = value.masked_fill(block.fully_masked.transpose(1, 2), float("-inf"))
            lse.copy_(value)
        return torch.softmax(scores, -1, out=scores)

    def add_gradients(
        self,
        d_scores: Tensor,
        vectors: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
        keys: _Heads,
        block: _Block,
    ) -> None:
        """Add the position terms' gradients.

        Args:
            d_scores: as an operand.
            vectors: queries and keys.
            grads: of the queries and keys, added to.
            keys: of the block.
            block: the block.
        """
        for name, table, x, by_vector, strips in self._terms(vectors, d_scores, block):
            assert table.grad is not None
            d_x = grads[0 if name == "c2p" else 1].unflatten(0, (self.heads, -1))
            for strip in strips:
                part, rows = by_vector[:, strip.vectors], table.rows[keys.heads, strip.columns]
                # Only diagonals are ever written: the rest stays zero.
                shape = (*part.shape[:2], rows.shape[1])
                buffer = self._kept_buffer(f"d_{name}", shape, self.dtype)
                strip.put_gradient(part, buffer)
                d_product = buffer.view(self.heads, -1, rows.shape[1])
                d_part = self.new("d_x", *d_product.shape[:2], rows.shape[2], dtype=self.wide)
                product_(d_part, d_product, rows, alpha=self.a.scale)
                target = d_x[:, :, strip.vectors]
                target += d_part.view(target.shape)
                product_(
                    table.grad[keys.heads, strip.columns],
                    d_product.transpose(1, 2),
                    self.split(x, strip.vectors),
                    beta=1.0,
                    alpha=self.a.scale,
                )

    def _terms(
        self, vectors: tuple[Tensor, Tensor], scores: Tensor, block: _Block
    ) -> Iterator[tuple[str, Table, Tensor, Tensor, list[_Strip]]]:
        """Yield each term's name, table, vectors, the scores with these as rows, and strips."""
        if self.tables.c2p is not None:
            yield "c2p", self.tables.c2p, vectors[0], scores, block.c2p
        if self.tables.p2c is not None:
            yield "p2c", self.tables.p2c, vectors[1], scores.transpose(1, 2), block.p2c


def forward_heads(call: Call, output: Tensor, lse: Tensor | None) -> None:
    """Compute the output, and the log-sum-exp of the scores if it is wanted.

    Args:
        call: the call.
        output: ``[batch, heads, q_len, head_dim]``; written.
        lse: float32 ``[batch, heads, q_len]``; written. None: not wanted.
    """
    factor = keep_scale(call.a.dropout_p)
    for rows, by_heads, blocks in call.blocks():
        for block in blocks:
            for keys in by_heads:
                at = (rows, keys.heads, block.queries)
                q = call.vectors(call.a.q, *at)
                part = None if lse is None else lse[at]
                probabilities = call.probabilities(q, keys, block, part)
                kept = call.kept(probabilities, call.keep(block, keys.heads))
                mixed = call.by_row(product_(call.new("out", *q.shape), kept, keys.v, alpha=factor))
                if block.fully_masked is not None:
                    mixed = mixed.masked_fill(block.fully_masked[:, None], 0.0)
                output[at] = mixed


def backward_heads(call: Call, d_output: Tensor, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> None:
    """Write the gradients of queries, keys and values; add to those of ``call.tables``.

    Args:
        call: the call, with gradients of its tables.
        d_output: gradient of the output, ``[batch, heads, q_len, head_dim]``.
        d_q: ``[batch, heads, q_len, head_dim]``; written.
        d_k: ``[batch, heads, k_len, head_dim]``; written.
        d_v: like ``d_k``; written.
    """
    for rows, by_heads, blocks in call.blocks():
        sums = [
            tuple(torch.zeros_like(x, dtype=call.wide) for x in (keys.k, keys.v))
            for keys in by_heads
        ]
        for block in blocks:
            for keys, totals in zip(by_heads, sums, strict=True):
                d_o = call.vectors(d_output, rows, keys.heads, block.queries)
                d_block = _backward_block(call, block, keys, d_o, totals)
                d_q[rows, keys.heads, block.queries] = call.by_row(d_block)
        for keys, totals in zip(by_heads, sums, strict=True):
            for grad, total in zip((d_k, d_v), totals, strict=True):
                grad[rows, keys.heads] = call.by_row(total)


def _backward_block(
    call: Call, block: _Block, keys: _Heads, d_o: Tensor, sums: tuple[Tensor, ...]
) -> Tensor:
    """Return the gradient of a block's queries; add to those of keys, values and tables.

    Args:
        call: the call.
        block: the block.
        keys: of its rows.
        d_o: gradient of its output, ``[heads * rows, queries, head_dim]``.
        sums: gradients of the keys and values in the dtype of the scores.
    """
    a, (d_k, d_v) = call.a, sums
    factor = keep_scale(a.dropout_p)
    q = call.vectors(a.q, block.rows, keys.heads, block.queries)
    if block.fully_masked is not None:
        by_head = d_o.unflatten(0, (call.heads, -1))
        d_o = by_head.masked_fill(block.fully_masked, 0.0).flatten(0, 1)
    probabilities, keep = call.probabilities(q, keys, block), call.keep(block, keys.heads)
    product_(d_v, call.kept(probabilities, keep).transpose(1, 2), d_o, beta=1.0, alpha=factor)
    wide = call.new("gradient", *probabilities.shape, dtype=call.wide)
    product_(wide, d_o, keys.v.transpose(1, 2), alpha=factor).mul_(probabilities)
    if keep is not None:
        wide.mul_(keep)
    total = wide.sum(-1, keepdim=True)
    d_scores = wide if wide.dtype == q.dtype else call.new("d_scores", *wide.shape)
    torch.addcmul(wide, probabilities, total, value=-1, out=d_scores)
    d_q = product_(call.new("d_q", *q.shape, dtype=call.wide), d_scores, keys.k, alpha=a.scale)
    product_(d_k, d_scores.transpose(1, 2), q, beta=1.0, alpha=a.scale)
    call.add_gradients(d_scores, (q, keys.k), (d_q, d_k), keys, block)
    return d_q


def select_heads(a: AttentionArguments, heads: slice) -> AttentionArguments:
    """Return the same call for a slice of its heads."""
    key, query = (None if x is None else x[heads] for x in (a.pos_key, a.pos_query))
    q, k, v = (x[:, heads] for x in (a.q, a.k, a.v))
    offset = a.head_offset + heads.start
    return a._replace(q=q, k=k, v=v, pos_key=key, pos_query=query, head_offset=offset)


def attend(a: AttentionArguments) -> tuple[Tensor, Tensor | None]:
    """Compute attention block by block.

    Args:
        a: checked arguments.

    Returns:
        Output like ``q``, and if requested the log-sum-exp of the scores, float32
        ``[batch, heads, q_len]``.
    """
    output, lse = _ChunkedAttention.apply(*a)
    return output, lse


class _ChunkedAttention(torch.autograd.Function):
    """Autograd function of the formulas in the module docstring."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        a = AttentionArguments(*args)
        ctx.save_for_backward(*args[:5])
        ctx.options = args[5:]
        output = torch.empty_like(a.q)
        lse = None
        if a.return_lse:
            lse = torch.empty(a.q.shape[:3], dtype=torch.float32, device=a.q.device)
            ctx.mark_non_differentiable(lse)

        def work(heads: slice) -> None:
            call = Call(select_heads(a, heads))
            forward_heads(call, output[:, heads], None if lse is None else lse[:, heads])

        for_heads(work, a.q.shape[1], _score_count(a), a.q.device.type)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        a = AttentionArguments(*ctx.saved_tensors, *ctx.options)
        vectors = [torch.empty_like(x) for x in (a.q, a.k, a.v)]
        both = (a.pos_key, a.pos_query)
        d_tables = [None if table is None else torch.empty_like(table) for table in both]

        def work(heads: slice) -> None:
            call = Call(select_heads(a, heads), gradients=True)
            backward_heads(call, *(x[:, heads] for x in (d_output, *vectors)))
            for d_table, table in zip(d_tables, call.tables, strict=True):
                if d_table is not None and table is not None:
                    d_table[heads] = table.folded_gradient(d_table)

        for_heads(work, a.q.shape[1], _score_count(a), a.q.device.type)
        return (*vectors, *d_tables, *(None for _ in ctx.options))


def _score_count(a: AttentionArguments) -> int:
    return a.q[..., 0].numel() * a.k.shape[2]

"""Triton helpers of the kernels: addresses, loads, position terms, dropout, softmax, gradients.

A tile is BLOCK queries by BLOCK keys, BLOCK a power of two. The position tables come in linear
form (one row per distance, see ``tables``), in blocks of BLOCK rows. With m = query tile - key
tile, query r and key c of a tile are m * BLOCK + r - c apart. That distance lies in block m where
c <= r and in block m - 1 elsewhere::

    high[r, w] = q_r . block_m[w]            the term of (r, c) is high[r, r - c]      for c <= r
    low[r, w]  = q_r . block_{m-1}[w]        and                   low[r, BLOCK + r - c]  for c > r

Both are column (r - c) mod BLOCK. The kernels therefore take ``high`` where w <= r and ``low``
elsewhere and rotate row r by r: one gather along the row, within a warp. The table of the keys
holds negated distances, so the same formulas hold with keys as rows and queries as columns, and
both terms, packed as two 16-bit halves of a word, share one rotation.

Neighbouring tiles share one of their two blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class HeadTensor(NamedTuple):
    """A ``[batch, heads, length, head_dim]`` tensor as a kernel argument; features contiguous."""

    pointer: Tensor
    batch_stride: int
    head_stride: int
    row_stride: int | tl.constexpr
    """Elements between positions; a compile-time constant except for gathered queries' kernels."""


class DropoutArguments(NamedTuple):
    """Dropout as a kernel argument: int64 seeds ``[batch]``, not read without dropout.

    Threshold and scale as in ``dropout_bits``; ``head_offset`` is the first head's global index.
    """

    seeds: Tensor
    threshold: int
    keep_scale: float
    head_offset: int


def head_tensor(x: Tensor) -> HeadTensor:
    """Return the kernel argument of a tensor whose last dimension is contiguous.

    Args:
        x: ``[batch, heads, length, head_dim]``.
    """
    batch_stride, head_stride, row_stride, _ = x.stride()
    return HeadTensor(x, batch_stride, head_stride, tl.constexpr(row_stride))


def gathered_tensor(x: Tensor) -> HeadTensor:
    """Return the kernel argument of a tensor, as ``head_tensor`` but with a run-time row stride.

    With it, fewer of the kernels of gathered queries spill registers.

    Args:
        x: ``[batch, heads, length, head_dim]``.
    """
    return HeadTensor(x, *x.stride()[:3])


@triton.jit
def opaque_zero(length, step):
    """Return zero in a form that the compiler cannot prove constant across loop iterations.

    Indices and masks derived from it are recomputed in each iteration, in a few instructions.
    Otherwise the compiler hoists them out of the loop and, for lack of registers, spills tiles to
    the stack. Combine it with indices by bitwise or: a thread's index is then one base register.

    Args:
        length: positions in a row, below 2**24.
        step: loop variable, or its end value for recomputation after the loop.
    """
    return (length >> 24) * step


@triton.jit
def program_tile(length, heads, BLOCK: tl.constexpr):
    """Return tile index, flattened (batch, head) index, batch row and head of this program.

    Args:
        heads: number of heads.
        length: positions in a row.
        BLOCK: tile size.
    """
    tiles = tl.cdiv(length, BLOCK)
    pair = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    batch = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    return tile, pair.to(tl.int64), batch, head


@triton.jit
def head_pointer(x, batch, head):
    """Return the pointer to the ``[length, head_dim]`` matrix of one row and head.

    Args:
        x: ``HeadTensor``.
        batch: row of the batch.
        head: local head.
    """
    return x.pointer + batch * x.batch_stride + head * x.head_stride


@triton.jit
def load_rows(
    pointer, stride, first, length, EVEN: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Load BLOCK rows of a ``[length, COLUMNS]`` matrix; zeros beyond its end unless EVEN.

    Args:
        pointer: of the matrix.
        stride: elements between rows.
        first: first row to load.
        length: rows of the matrix; not read with EVEN.
        EVEN: all rows exist.
        BLOCK: rows to load.
        COLUMNS: columns of the matrix.

    Returns:
        ``[BLOCK, COLUMNS]``.
    """
    row = first + tl.arange(0, BLOCK)
    pointers = pointer + row[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(row < length)[:, None], other=0.0)


@triton.jit
def store_rows(pointer, stride, row, length, value, COLUMNS: tl.constexpr):
    """Store a ``[BLOCK, COLUMNS]`` tile to the rows ``row`` of a ``[length, COLUMNS]`` matrix.

    Args:
        pointer: of the matrix.
        stride: elements between rows.
        row: rows to store, int32 ``[BLOCK]``; those from ``length`` on are not stored.
        length: rows of the matrix.
        value: the tile, converted to the dtype of the matrix.
        COLUMNS: columns of the matrix.
    """
    pointers = pointer + row[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
    tl.store(pointers, value.to(pointer.dtype.element_ty), mask=(row < length)[:, None])


@triton.jit
def load_vector(pointer, first, length, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Load one number per position of a tile; zeros beyond the end of the row unless EVEN.

    Args:
        pointer: of the row.
        first: first position of the tile.
        length: positions in the row.
        EVEN: all positions exist.
        BLOCK: tile size.

    Returns:
        ``[BLOCK]``.
    """
    offsets = tl.arange(0, BLOCK)
    # First the tile's address, which all threads share; a thread's own offsets are constants.
    pointers = pointer + first + offsets
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=offsets < length - first, other=0.0)


@triton.jit
def band_tile(BAND, index, BLOCK: tl.constexpr):
    """Return pointers to one ``[BLOCK, BLOCK]`` tile of the band of score gradients.

    Args:
        BAND: pointer to the tiles ``[tiles, BLOCK, BLOCK]``.
        index: of the tile.
        BLOCK: tile size.
    """
    offsets = tl.arange(0, BLOCK)
    return BAND + index * (BLOCK * BLOCK) + offsets[:, None] * BLOCK + offsets[None, :]


@triton.jit
def dot(a, b, accumulator=None):
    """Multiply two tiles, fp32 without TF32.

    Args:
        a: ``[M, K]``.
        b: ``[K, N]``.
        accumulator: float32 ``[M, N]`` that the product is added to; None: zeros.

    Returns:
        float32 ``[M, N]``.
    """
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def visible_tiles(BEGIN, END, tile, length, near, RANGES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the tiles that a tile attends to, or is attended by, and the near ones among them.

    Args:
        BEGIN: first visible position of each position, int32 ``[length]``, non-decreasing.
        END: one past the last.
        tile: tile index.
        length: positions in a row.
        near: tiles fewer than this apart use the position tables.
        RANGES: whether visibility is limited; otherwise the pointers are not read.
        BLOCK: tile size.

    Returns:
        begin, end, near_begin and near_end, in tiles.
    """
    begin = 0
    end = tl.cdiv(length, BLOCK)
    if RANGES:
        begin = tl.load(BEGIN + tile * BLOCK) // BLOCK
        last = tl.minimum(tile * BLOCK + BLOCK, length) - 1
        end = (tl.load(END + last) + BLOCK - 1) // BLOCK
    return begin, end, tl.maximum(begin, tile - near + 1), tl.minimum(end, tile + near)


@triton.jit
def far_tiles(begin, end, near_begin, near_end, side: tl.constexpr):
    """Return the range of far tiles before (side 0) or after (side 1) the near ones.

    Args:
        begin, end, near_begin, near_end: of ``visible_tiles``.
        side: 0 or 1.
    """
    far_begin = begin if side == 0 else tl.maximum(begin, near_end)
    far_end = tl.minimum(end, near_begin) if side == 0 else end
    return far_begin, far_end


@triton.jit
def rotate(x, zero, BLOCK: tl.constexpr):
    """Return ``x[row, (row - column) mod BLOCK]`` at each row and column; its own inverse.

    Args:
        x: ``[BLOCK, BLOCK]``.
        zero: ``opaque_zero``.
        BLOCK: tile size.
    """
    row = (tl.arange(0, BLOCK) | zero)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    return tl.gather(x, (row - column) & (BLOCK - 1), 1)


@triton.jit
def rotate_halves(x, zero, BLOCK: tl.constexpr):
    """Return the result of ``rotate``, with fewer instructions where a row is wider than a warp.

    Columns w and w + BLOCK / 2 come from the same two columns, at (row - w) mod BLOCK / 2 of each
    half of the row, so both halves are gathered with the same indices, each element from one
    register, and exchanged where (row - w) mod BLOCK is in the right half. 16-bit halves are
    gathered as one word.

    Arguments as in ``rotate``.
    """
    if BLOCK < 64:
        return rotate(x, zero, BLOCK)
    HALF: tl.constexpr = BLOCK // 2
    left, right = tl.split(tl.permute(tl.reshape(x, [BLOCK, 2, HALF]), [0, 2, 1]))
    source = (tl.arange(0, BLOCK) | zero)[:, None] - tl.arange(0, HALF)[None, :]
    crossed = (source & HALF) != 0
    source = source & (HALF - 1)
    if x.dtype.primitive_bitwidth == 16:
        word = tl.gather(pack_halves(left, right), source, 1)
        word = tl.where(crossed, (word >> 16) | (word << 16), word)
        left, right = unpack_half(word, False, x.dtype), unpack_half(word, True, x.dtype)
    else:
        a = tl.gather(left, source, 1)
        b = tl.gather(right, source, 1)
        left = tl.where(crossed, b, a)
        right = tl.where(crossed, a, b)
    return tl.reshape(tl.permute(tl.join(left, right), [0, 2, 1]), [BLOCK, BLOCK])


@triton.jit
def pack_halves(lower, upper):
    """Return words with these 16-bit elements as their halves."""
    lower = lower.to(tl.uint16, bitcast=True).to(tl.uint32)
    return lower | (upper.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def unpack_half(word, UPPER: tl.constexpr, dtype: tl.constexpr):
    """Return one half of words of ``pack_halves``.

    Args:
        word: uint32, any shape.
        UPPER: return the upper half.
        dtype: of the result, 16 bits wide.
    """
    half = word >> 16 if UPPER else word & 0xFFFF
    return half.to(tl.uint16).to(dtype, bitcast=True)


@triton.jit
def in_high_block(zero, BLOCK: tl.constexpr):
    """Return the mask of terms that come from the block of greater distances."""
    return tl.arange(0, BLOCK)[None, :] <= (tl.arange(0, BLOCK) | zero)[:, None]


@triton.jit
def table_product(x, TABLE, row, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Multiply vectors by the block of a linear table that starts at ``row``.

    Args:
        x: vectors ``[BLOCK, HEAD_DIM]``.
        TABLE: linear table of one head, ``[2 * near * BLOCK, HEAD_DIM]``.
        row: first row of the block.
        BLOCK: tile size.
        HEAD_DIM: features per head.

    Returns:
        float32 ``[BLOCK, BLOCK]``, vectors by rows of the block.
    """
    rows = load_rows(TABLE, HEAD_DIM, row, 0, True, BLOCK, HEAD_DIM)
    return dot(x, tl.trans(rows))


@triton.jit
def select_terms(high, low, zero, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Select each unrotated term from the products with the blocks of greater and lesser distances.

    Args:
        high: products with the block of greater distances.
        low: products with the block of lesser distances.
        zero: ``opaque_zero``.
        HALF: return float16 instead of float32.
        BLOCK: tile size.
    """
    terms = tl.where(in_high_block(zero, BLOCK), high, low)
    return terms.to(tl.float16 if HALF else tl.float32)


@triton.jit
def tile_terms(
    x, TABLE, row, zero, HALF: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Return the unrotated terms of vectors whose block of greater distances starts at ``row``.

    Args:
        x: vectors ``[BLOCK, HEAD_DIM]``.
        TABLE: linear table of one head, ``[2 * near * BLOCK, HEAD_DIM]``.
        row: first row of the block of greater distances.
        zero: ``opaque_zero``.
        HALF: return float16 instead of float32.
        BLOCK: tile size.
        HEAD_DIM: features per head.

    Returns:
        ``select_terms``, ``[BLOCK, BLOCK]``.
    """
    high = table_product(x, TABLE, row, BLOCK, HEAD_DIM)
    low = table_product(x, TABLE, row - BLOCK, BLOCK, HEAD_DIM)
    return select_terms(high, low, zero, HALF, BLOCK)


@triton.jit
def position_bias(
    rows, columns, zero, unpack_scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the position terms of a tile, float32 ``[BLOCK, BLOCK]``.

    Args:
        rows: ``select_terms`` of the tile's rows.
        columns: ``select_terms`` of the tile's columns, one row per column.
        zero: ``opaque_zero``.
        unpack_scale: factor on terms; read only with HALF.
        ROWS: whether the rows have a term.
        COLUMNS: whether the columns have a term.
        HALF: terms are float16; both are rotated at once.
        BLOCK: tile size.
    """
    if ROWS and COLUMNS and HALF:
        word = rotate_halves(pack_halves(rows, columns), zero, BLOCK)
        bias = unpack_half(word, False, tl.float16).to(tl.float32)
        bias += tl.trans(unpack_half(word, True, tl.float16)).to(tl.float32)
    else:
        bias = tl.zeros([BLOCK, BLOCK], tl.float32)
        if ROWS:
            bias += rotate_halves(rows, zero, BLOCK).to(tl.float32)
        if COLUMNS:
            bias += tl.trans(rotate_halves(columns, zero, BLOCK)).to(tl.float32)
    if HALF:
        bias *= unpack_scale
    return bias


@triton.jit
def visible_range(BEGIN, END, position, length, RANGES: tl.constexpr):
    """Return the first visible position of each position and one past the last.

    Args:
        BEGIN, END: int32 ``[length]``; only with RANGES.
        position: int32 ``[BLOCK]``.
        length: positions in a row.
        RANGES: whether visibility is limited.

    Returns:
        int32 ``[BLOCK]`` each; an empty range for positions outside of the row.
    """
    begin = position * 0
    end = tl.where(position < length, length, 0)
    if RANGES:
        begin = tl.load(BEGIN + position, mask=position < length, other=0)
        end = tl.load(END + position, mask=position < length, other=0)
    return begin, end


@triton.jit
def mix32(x):
    """Apply ``mix`` of ``dropout_bits`` to unsigned 32-bit integers."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_state(dropout, batch, head, DROP: tl.constexpr):
    """Return the dropout hash of a row of the batch and a local head, uint32.

    Args:
        dropout: ``DropoutArguments``.
        batch: row of the batch.
        head: local head.
        DROP: whether there is dropout; otherwise the result is not used.
    """
    state = head.to(tl.uint32)
    if DROP:
        seed = tl.load(dropout.seeds + batch)
        low = (seed & 0xFFFFFFFF).to(tl.uint32)
        high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
        global_head = (head + dropout.head_offset).to(tl.uint32)
        state = mix32(mix32(mix32(low ^ 0x9E3779B9) ^ high) ^ global_head)
    return state


@triton.jit
def tile_pairs(first, BLOCK: tl.constexpr):
    """Return the pair of each position of a tile and whether it is the pair's second.

    As ``pairs`` in a form that shows the compiler which positions of a thread share a pair: one
    pair's hash is then computed once.

    Args:
        first: first position of the tile, a multiple of 16.
        BLOCK: tile size.
    """
    shape: tl.constexpr = [BLOCK // 16, 2, 8]
    pair = first // 2 + 8 * tl.arange(0, BLOCK // 16)[:, None] + tl.arange(0, 8)[None, :]
    pair = tl.reshape(tl.broadcast_to(pair[:, None, :], shape), [BLOCK])
    second = tl.reshape(tl.broadcast_to(tl.arange(0, 2)[None, :, None], shape), [BLOCK])
    return pair, second


@triton.jit
def pairs(position):
    """Return ``pair`` and ``second`` of ``dropout_bits`` of each position."""
    return (position >> 4) * 8 + (position & 7), (position >> 3) & 1


@triton.jit
def keep_mask(state, query_pairs, first_key, dropout, BY_KEY: tl.constexpr, BLOCK: tl.constexpr):
    """Return the dropout mask of a tile, ``[BLOCK, BLOCK]``, True = keep.

    Args:
        state: ``dropout_state``.
        query_pairs: ``tile_pairs`` or ``pairs`` of the queries.
        first_key: position of the tile's first key.
        dropout: ``DropoutArguments``.
        BY_KEY: the tile's rows are keys; otherwise queries.
        BLOCK: tile size.
    """
    query_pair, second_query = query_pairs
    key_pair, second_key = tile_pairs(first_key, BLOCK)
    row_key = mix32(state ^ query_pair.to(tl.uint32))
    column_key = key_pair.to(tl.uint32) * 0x9E3779B9
    # A byte is shifted to the top of the word, where the comparison needs no mask.
    row_shift = (24 - 16 * second_query).to(tl.uint32)
    column_shift = (8 * second_key).to(tl.uint32)
    if BY_KEY:
        word = mix32(row_key[None, :] ^ column_key[:, None])
        top_byte = word << (row_shift[None, :] - column_shift[:, None])
    else:
        word = mix32(row_key[:, None] ^ column_key[None, :])
        top_byte = word << (row_shift[:, None] - column_shift[None, :])
    return top_byte >= (tl.cast(dropout.threshold, tl.uint32) << 24)


@triton.jit
def softmax_step(
    scores, v, row_max, row_sum, accumulator, first_key, key_begin, key_end, state, query_pairs,
    log2_scale, dropout, MASKED: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the online softmax, in base 2.

    Args:
        scores: unscaled, float32 ``[BLOCK, BLOCK]``.
        v: values of the keys.
        row_max: maximum of each query's scores so far, times log2_scale.
        row_sum: sum of 2**(score * log2_scale - row_max) so far.
        accumulator: sum of values with these weights so far.
        first_key: position of the tile's first key.
        key_begin: first visible key of each query; read only with MASKED.
        key_end: one past the last; read only with MASKED.
        state: ``dropout_state``.
        query_pairs: ``tile_pairs`` or ``pairs`` of the queries.
        log2_scale: scale of the scores / ln 2.
        dropout: ``DropoutArguments``.
        MASKED: whether any key is hidden.
        DROP: whether there is dropout.
        BLOCK: tile size.

    Returns:
        The new row_max, row_sum and accumulator.
    """
    if MASKED:
        key = first_key + tl.arange(0, BLOCK)
        visible = (key[None, :] >= key_begin[:, None]) & (key[None, :] < key_end[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    # Scaled after the maximum, so that the scale is part of the fused multiply-add below.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * log2_scale)
    base = new_max
    if MASKED:  # avoids inf - inf for queries without a visible key so far
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.math.exp2(scores * log2_scale - base[:, None])
    rescale = tl.math.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    if DROP:
        p = tl.where(keep_mask(state, query_pairs, first_key, dropout, False, BLOCK), p, 0.0)
    accumulator = dot(p.to(v.dtype), v, accumulator * rescale[:, None])
    return new_max, row_sum, accumulator


@triton.jit
def softmax_result(row_max, row_sum, keep_scale):
    """Return the factor on the accumulator and the log2-sum-exp2; 0 and -inf if nothing is visible.

    Args:
        row_max: of ``softmax_step``.
        row_sum: of ``softmax_step``.
        keep_scale: factor on kept elements.
    """
    hidden = row_sum == 0.0
    factor = tl.where(hidden, 0.0, keep_scale / tl.where(hidden, 1.0, row_sum))
    log2_sum = row_max + tl.math.log2(tl.where(hidden, 1.0, row_sum))
    return factor, tl.where(hidden, float("-inf"), log2_sum)


@triton.jit
def signed_probabilities(
    scores, lse2, visible, state, query_pairs, first_key, log2_scale, dropout,
    BY_KEY: tl.constexpr, MASKED: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return probabilities, negated where dropout drops: one register per element for both.

    Args:
        scores: unscaled, float32 ``[BLOCK, BLOCK]``.
        lse2: log2-sum-exp2 of the queries ``[BLOCK]``.
        visible: mask like ``scores``; read only with MASKED.
        state: ``dropout_state``.
        query_pairs: ``tile_pairs`` or ``pairs`` of the queries.
        first_key: position of the tile's first key.
        log2_scale: scale of the scores / ln 2.
        dropout: ``DropoutArguments``.
        BY_KEY: the tile's rows are keys; otherwise queries.
        MASKED: whether any key is hidden.
        DROP: whether there is dropout.
        BLOCK: tile size.
    """
    lse2 = lse2[None, :] if BY_KEY else lse2[:, None]
    p = tl.math.exp2(scores * log2_scale - lse2)
    if MASKED:
        p = tl.where(visible, p, 0.0)
    if DROP:
        keep = keep_mask(state, query_pairs, first_key, dropout, BY_KEY, BLOCK)
        p = tl.where(keep, p, -p)
    return p


@triton.jit
def score_gradient(signed, products, delta, keep_scale, DROP: tl.constexpr):
    """Return the gradient of the scaled scores.

    Args:
        signed: ``signed_probabilities``.
        products: products of the output's gradient with the values.
        delta: products of the output with its gradient, per query.
        keep_scale: factor on kept elements.
        DROP: whether there is dropout.
    """
    if DROP:
        # Multiplied after the selection, so that it is part of a fused multiply-add.
        products = tl.where(signed > 0, products, 0.0) * keep_scale
    return tl.abs(signed) * (products - delta)

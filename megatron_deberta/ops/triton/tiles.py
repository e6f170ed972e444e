"""What the fused kernels share inside a tile: the position terms, the masks and the dropout bits.

A tile is B queries by B keys, B a power of two. The tables come in linear form (one row a distance,
``tables``), cut into blocks of B rows. With m = query tile - key tile, a query r and a key c
of a tile are mB + r - c apart, which lies in block m where c <= r and in block m - 1 elsewhere::

    high[r, w] = q_r . block_m[w]            the term of (r, c) is high[r, r - c]      for c <= r
    low[r, w]  = q_r . block_{m-1}[w]        and                   low[r, B + r - c]   for c > r

Both are column (r - c) mod B. So we take ``high`` where w <= r and ``low`` elsewhere, and then
rotate row r by r: one gather along the row, which never leaves a warp. The keys' table holds
negated distances; then the same words hold with keys for rows and queries for columns, and the
two terms, packed as two 16-bit halves of a word, share one rotation.

The next tile to the side needs one new block, as the other one is shared.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hidden_zero(count, step):
    """Zero, which the compiler takes for a number that changes from step to step.

    What is computed from it is computed anew in every step of a loop, in a few instructions.
    Without, the compiler computes indices and masks once before the loop, keeps them all, and has
    no registers left for the tiles: it stores them on the stack. Into indices it is best or-ed: a
    thread's indices are a base with constants or-ed in, and only then is the base all that is kept.

    Args:
        count: length of a row, below 2**24.
        step: of the loop, or its end where something is wanted anew after it.
    """
    return (count >> 24) * step


@triton.jit
def rotate(x, zero, B: tl.constexpr):
    """Column (row - column) mod B of each row; its own inverse.

    Args:
        x: ``[B, B]``.
        zero: ``hidden_zero``.
        B: tile size.
    """
    row = (tl.arange(0, B) | zero)[:, None]
    column = tl.arange(0, B)[None, :]
    return tl.gather(x, (row - column) & (B - 1), 1)


@triton.jit
def in_high_block(zero, B: tl.constexpr):
    """Where the products with the block of greater distances hold a tile's terms."""
    return tl.arange(0, B)[None, :] <= (tl.arange(0, B) | zero)[:, None]


@triton.jit
def pack(low, high):
    """Two float16 as the halves of a word."""
    low = low.to(tl.uint16, bitcast=True).to(tl.uint32)
    high = high.to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high << 16)


@triton.jit
def low_half(word):
    """The first of two packed floats."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def high_half(word):
    """The second of two packed floats."""
    return (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def own_terms(high_product, low_product, zero, HALF: tl.constexpr, B: tl.constexpr):
    """A tile's terms of its rows, each row still to be rotated, in the precision for it.

    Args:
        high_product: products of the rows with the block of greater distances.
        low_product: with the block of smaller distances.
        zero: ``hidden_zero``.
        HALF: float16 suffices for the terms.
        B: tile size.
    """
    terms = tl.where(in_high_block(zero, B), high_product, low_product)
    return terms.to(tl.float16 if HALF else tl.float32)


@triton.jit
def position_bias(
    rows,
    columns,
    zero,
    unpack_scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    B: tl.constexpr,
):
    """Position terms of a tile, float32 ``[B, B]``.

    Args:
        rows: ``own_terms`` of the tile's rows.
        columns: of its columns, as rows.
        zero: ``hidden_zero``.
        unpack_scale: what terms are to be multiplied by; read only with ``HALF``.
        ROWS: whether there is a term of the rows.
        COLUMNS: whether there is a term of the columns.
        HALF: float16 suffices for the terms; both are rotated at once.
        B: tile size.
    """
    if ROWS and COLUMNS and HALF:
        word = rotate(pack(rows, columns), zero, B)
        bias = low_half(word).to(tl.float32) + tl.trans(high_half(word)).to(tl.float32)
    else:
        bias = tl.zeros([B, B], tl.float32)
        if ROWS:
            bias += rotate(rows, zero, B).to(tl.float32)
        if COLUMNS:
            bias += tl.trans(rotate(columns, zero, B)).to(tl.float32)
    if HALF:
        bias *= unpack_scale
    return bias


@triton.jit
def rows_of(tensor, stride, first, count, EVEN: tl.constexpr, B: tl.constexpr, D: tl.constexpr):
    """B rows of a ``[count, D]`` matrix; zeros beyond its end.

    Args:
        tensor: pointer to the matrix.
        stride: elements between rows.
        first: first row.
        count: rows of the matrix.
        EVEN: the matrix is known to end with a tile.
        B: rows wanted.
        D: columns.
    """
    row = first + tl.arange(0, B)
    pointers = tensor + row[:, None] * stride + tl.arange(0, D)[None, :]
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(row < count)[:, None], other=0.0)


@triton.jit
def numbers_of(tensor, first, count, EVEN: tl.constexpr, B: tl.constexpr):
    """One number a position of a tile; zeros beyond the end of the row.

    Args:
        tensor: pointer to the numbers of a row.
        first: first position.
        count: of the row.
        EVEN: the row is known to end with a tile.
        B: positions wanted.
    """
    within = tl.arange(0, B)
    # First the pointer to the tile, which threads share, then what is a thread's own: constants.
    pointers = tensor + first + within
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=within < count - first, other=0.0)


@triton.jit
def mix32(x):
    """``mix`` of ``dropout_bits``, on unsigned 32-bit integers."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def head_state(seeds, batch, head):
    """The part of the dropout hash that a (row, global head) shares."""
    seed = tl.load(seeds + batch)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return mix32(mix32(mix32(low ^ 0x9E3779B9) ^ high) ^ head.to(tl.uint32))


@triton.jit
def keep_tile(row_key, first_key, threshold, B: tl.constexpr):
    """Which elements of a tile of queries by keys dropout keeps, ``[B, B]``.

    Four keys share a word of the hash, so it is computed once for the four.

    Args:
        row_key: hash of the queries, uint32 ``[B]``.
        first_key: position of the tile's first key, a multiple of 4.
        threshold: ``dropout_bits.drop_threshold``.
        B: tile size.
    """
    group = (first_key // 4 + tl.arange(0, B // 4)).to(tl.uint32) * 0x9E3779B9
    shift = (8 * tl.arange(0, 4)).to(tl.uint32)
    word = mix32(row_key[:, None] ^ group[None, :])
    byte = (word[:, :, None] >> shift[None, None, :]) & 255
    return tl.reshape((byte >= tl.cast(threshold, tl.uint32)).to(tl.int8), [B, B]) != 0


@triton.jit
def keep_tile_by_key(row_key, first_key, threshold, B: tl.constexpr):
    """As ``keep_tile`` for a tile of keys by queries, where no thread has four keys of a query."""
    key = first_key + tl.arange(0, B)
    group = (key >> 2).to(tl.uint32) * 0x9E3779B9
    word = mix32(row_key[None, :] ^ group[:, None])
    # The byte moves to the top, where a comparison needs no mask.
    byte_on_top = word << (24 - 8 * (key & 3)).to(tl.uint32)[:, None]
    return byte_on_top >= (tl.cast(threshold, tl.uint32) << 24)


@triton.jit
def visible_tiles(LOW, HIGH, tile, count, others, RANGES: tl.constexpr, B: tl.constexpr):
    """First and one past the last tile that a tile sees, or is seen by.

    ``LOW`` and ``HIGH`` never fall along a row, so the ends of the tile tell.

    Args:
        LOW: first position each position of this row sees, int32 ``[count]``.
        HIGH: one past the last, int32 ``[count]``.
        tile: which tile.
        count: length of the row.
        others: tiles in the row it looks at.
        RANGES: whether there are ranges; if not, everything is seen.
        B: tile size.
    """
    begin = 0
    end = others
    if RANGES:
        begin = tl.load(LOW + tile * B) // B
        end = (tl.load(HIGH + tl.minimum(tile * B + B, count) - 1) + B - 1) // B
    return begin, end

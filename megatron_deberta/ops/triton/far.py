"""The kernels of tiles whose distances all lie beyond the tables.

All distances of such a tile share one slot a side, the one of the table's first or last row. Its
scores are q . k plus one number a query and one a key; what the tables get from it are sums of dS
over queries or keys, times vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_deberta.ops.triton.backward import (
    hash_rows,
    own_range,
    score_gradient,
    signed_probabilities,
)
from megatron_deberta.ops.triton.tiles import hidden_zero, numbers_of, rows_of, visible_tiles


@triton.jit
def end_products_kernel(
    X, TABLE, OUT, x_b, x_h, x_n, heads, count, last, B: tl.constexpr, D: tl.constexpr
):
    """Products of every vector with the first and the last row of a table.

    Args:
        X: ``[batch, heads, count, D]`` of strides ``x_b``, ``x_h``, ``x_n``.
        TABLE: ``[heads, last + 1, D]``.
        OUT: float32 ``[batch, heads, 2, count]``.
        x_b: stride.
        x_h: stride.
        x_n: stride.
        heads: number of heads.
        count: vectors of a head.
        last: index of the table's last row.
        B: vectors of a program.
        D: head size.
    """
    tiles = tl.cdiv(count, B)
    pair = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles) * B
    batch = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    x = rows_of(X + batch * x_b + head * x_h, x_n, first, count, False, B, D).to(tl.float32)
    row = TABLE + head * (last + 1) * D + tl.arange(0, D)
    at = first + tl.arange(0, B)
    out = OUT + pair.to(tl.int64) * 2 * count + at
    tl.store(out, tl.sum(x * tl.load(row).to(tl.float32)[None, :], 1), mask=at < count)
    product = tl.sum(x * tl.load(row + last * D).to(tl.float32)[None, :], 1)
    tl.store(out + count, product, mask=at < count)


@triton.jit
def far_key_kernel(
    Q,
    K,
    V,
    D_OUT,
    QUERY_TABLE,
    Q_ENDS,
    K_ENDS,
    SEEN_LOW,
    SEEN_HIGH,
    SEED,
    LSE2,
    DELTA,
    D_V_FAR,
    D_K_FAR,
    K_SUMS,
    q_b, q_h, q_n: tl.constexpr, k_b, k_h, k_n: tl.constexpr, v_b, v_h, v_n: tl.constexpr,
    g_b, g_h, g_n: tl.constexpr,
    heads,
    count,
    near,
    scale2,
    threshold,
    keep_scale,
    head_offset,
    B: tl.constexpr,
    D: tl.constexpr,
    C2P: tl.constexpr,
    P2C: tl.constexpr,
    RANGES: tl.constexpr,
    EVEN: tl.constexpr,
    DROP: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """What keys take from far queries: parts of dV and dK, and sums for the table's ends.

    Arguments are those of ``backward.key_kernel``, and:

    Args:
        Q_ENDS: products of the queries with the ends of the table of keys.
        K_ENDS: products of the keys with the ends of ``QUERY_TABLE``.
        D_V_FAR: float32 ``[batch, heads, count, D]``, dV before the scale of dropout.
        D_K_FAR: likewise dK, before the scale of the scores.
        K_SUMS: float32 ``[batch, heads, 2, count]``, dS summed over the far queries that take
            the first and the last row of ``QUERY_TABLE``.
        VALUES: whether dV is wanted.
        KEYS: whether dK and its sums are.
    """
    MASKED: tl.constexpr = RANGES or not EVEN
    tiles = tl.cdiv(count, B)
    pair = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    batch = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    Q += batch * q_b + head * q_h
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    D_OUT += batch * g_b + head * g_h
    QUERY_TABLE += head * (2 * near * B) * D
    row = pair.to(tl.int64) * count
    dtype = Q.dtype.element_ty

    within = tl.arange(0, B)
    columns = tl.arange(0, D)
    key = tile * B + within
    k = rows_of(K, k_n, tile * B, count, EVEN, B, D)
    v = rows_of(V, v_n, tile * B, count, EVEN, B, D)
    low, high = own_range(SEEN_LOW + batch * count, SEEN_HIGH + batch * count, key, count, RANGES)
    begin, end = visible_tiles(
        SEEN_LOW + batch * count, SEEN_HIGH + batch * count, tile, count, tiles, RANGES, B
    )
    near_begin = tl.maximum(begin, tile - near + 1)
    near_end = tl.minimum(end, tile + near)
    d_v = tl.zeros([B, D], tl.float32)
    d_k = tl.zeros([B, D], tl.float32)
    # Side 0: queries far behind the keys; side 1: far before.
    for side in tl.static_range(2):
        k_end = tl.zeros([B], tl.float32)
        if P2C:
            k_end = tl.load(K_ENDS + 2 * row + side * count + key, mask=key < count, other=0.0)
        sums = tl.zeros([B], tl.float32)
        far_begin = tl.maximum(begin, near_end) if side == 0 else begin
        far_end = end if side == 0 else tl.minimum(end, near_begin)
        for query_tile in range(far_begin, far_end):
            at = query_tile * B + within
            q = rows_of(Q, q_n, query_tile * B, count, EVEN, B, D)
            d_out = rows_of(D_OUT, g_n, query_tile * B, count, EVEN, B, D)
            zero = hidden_zero(count, query_tile)
            scores = tl.dot(k, tl.trans(q), input_precision="ieee") + k_end[:, None]
            if C2P:
                ends = Q_ENDS + 2 * row + (1 - side) * count
                q_end = numbers_of(ends, query_tile * B + zero, count, EVEN, B)
                scores += q_end[None, :]
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            row_key = hash_rows(SEED, at, batch, head + head_offset, DROP)
            # Loaded where they are used: earlier, they would take registers from the products.
            lse2 = numbers_of(LSE2 + row, query_tile * B + zero, count, EVEN, B)
            signed = signed_probabilities(
                scores, lse2, seen, row_key, tile * B, scale2, threshold,
                True, MASKED, DROP, B,
            )  # fmt: skip
            if VALUES:
                kept = tl.maximum(signed, 0.0).to(dtype)
                d_v = tl.dot(kept, d_out, d_v, input_precision="ieee")
            if KEYS:
                delta = numbers_of(DELTA + row, query_tile * B + zero, count, EVEN, B)
                products = tl.dot(v, tl.trans(d_out), input_precision="ieee")
                d_scores = score_gradient(signed, products, delta[None, :], keep_scale, DROP)
                d_k = tl.dot(d_scores.to(dtype), q, d_k, input_precision="ieee")
                sums += tl.sum(d_scores, 1)
        if KEYS and P2C:
            end_row = QUERY_TABLE + side * (2 * near * B - 1) * D + columns
            d_k += sums[:, None] * tl.load(end_row).to(tl.float32)[None, :]
            tl.store(K_SUMS + 2 * row + side * count + key, sums, mask=key < count)
    key = tile * B + within + hidden_zero(count, near_end)
    place = row * D + key[:, None] * D + columns[None, :]
    if KEYS:
        tl.store(D_K_FAR + place, d_k, mask=(key < count)[:, None])
    if VALUES:
        tl.store(D_V_FAR + place, d_v, mask=(key < count)[:, None])


@triton.jit
def end_gradient_kernel(
    X,
    SUMS,
    OUT,
    x_b,
    x_h,
    x_n,
    batches,
    heads,
    count,
    shares,
    B: tl.constexpr,
    D: tl.constexpr,
):
    """Gradient of a table's two ends from far tiles: dS summed a vector, times the vector.

    Args:
        X: queries or keys, ``[batch, heads, count, D]`` of strides ``x_b``, ``x_h``, ``x_n``.
        SUMS: float32 ``[batch, heads, 2, count]``.
        OUT: float32 ``[heads, 2, shares, D]``, to be added up.
        x_b: stride.
        x_h: stride.
        x_n: stride.
        batches: batch rows.
        heads: local heads.
        count: length of a row.
        shares: programs a head's tiles are shared out to.
        B: vectors of a step.
        D: head size.
    """
    head = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    tiles = tl.cdiv(count, B)
    first = tl.zeros([D], tl.float32)
    last = tl.zeros([D], tl.float32)
    for step in range(share, batches * tiles, shares):
        batch = (step // tiles).to(tl.int64)
        at = (step % tiles) * B + tl.arange(0, B)
        x = rows_of(X + batch * x_b + head * x_h, x_n, (step % tiles) * B, count, False, B, D)
        x = x.to(tl.float32)
        sums = SUMS + (batch * heads + head) * 2 * count + at
        first += tl.sum(tl.load(sums, mask=at < count, other=0.0)[:, None] * x, 0)
        last += tl.sum(tl.load(sums + count, mask=at < count, other=0.0)[:, None] * x, 0)
    out = OUT + (head * 2 * shares + share) * D + tl.arange(0, D)
    tl.store(out, first)
    tl.store(out + shares * D, last)

"""The forward kernel: a program owns a tile of queries and walks over the keys that it sees.

Tiles whose distances all lie beyond the table need no products with it: all their distances share
a slot, so their score is q . k plus one number a query and one a key (``far``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_deberta.ops.triton.tiles import (
    head_state,
    hidden_zero,
    keep_tile,
    mix32,
    own_terms,
    position_bias,
    rows_of,
    visible_tiles,
)


@triton.jit
def softmax_step(
    scores,
    v,
    peak,
    total,
    mixed,
    first_key,
    low,
    high,
    row_key,
    scale2,
    threshold,
    MASKED: tl.constexpr,
    DROP: tl.constexpr,
    B: tl.constexpr,
):
    """Takes one tile of keys into the running softmax; in units of log 2."""
    scores = scores * scale2
    if MASKED:
        key = first_key + tl.arange(0, B)
        seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = new_peak
    if MASKED:  # a query that has seen nothing yet must not meet inf - inf
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.math.exp2(scores - base[:, None])
    fade = tl.math.exp2(peak - base)
    total = total * fade + tl.sum(p, 1)
    if DROP:
        p = tl.where(keep_tile(row_key, first_key, threshold, B), p, 0.0)
    mixed = mixed * fade[:, None]
    mixed = tl.dot(p.to(v.dtype), v, mixed, input_precision="ieee")
    return new_peak, total, mixed


@triton.jit
def forward_kernel(
    Q,
    K,
    V,
    KEY_TABLE,
    QUERY_TABLE,
    Q_ENDS,
    K_ENDS,
    LOW,
    HIGH,
    SEED,
    OUT,
    LSE2,
    q_b,
    q_h,
    q_n: tl.constexpr,
    k_b,
    k_h,
    k_n: tl.constexpr,
    v_b,
    v_h,
    v_n: tl.constexpr,
    o_b,
    o_h,
    o_n: tl.constexpr,
    heads,
    count,
    near,
    scale2,
    threshold,
    keep_scale,
    head_offset,
    unpack_scale,
    B: tl.constexpr,
    D: tl.constexpr,
    C2P: tl.constexpr,
    P2C: tl.constexpr,
    HALF: tl.constexpr,
    FAR: tl.constexpr,
    RANGES: tl.constexpr,
    EVEN: tl.constexpr,
    DROP: tl.constexpr,
):
    """Output and log2-sum-exp2 of a tile of queries.

    Args:
        Q: queries, and likewise ``K``, ``V``, ``OUT``: ``[batch, heads, count, D]``, strides below.
        K: keys.
        V: values.
        KEY_TABLE: ``[heads, 2 * near * B, D]``, one row a distance, divided by ``unpack_scale``.
        QUERY_TABLE: the same, of negated distances.
        Q_ENDS: products of the queries with the ends of ``KEY_TABLE``; read only with ``FAR``.
        K_ENDS: products of the keys with the ends of ``QUERY_TABLE``; likewise.
        LOW: first key a query sees, int32 ``[batch, count]``; read only with ``RANGES``.
        HIGH: one past the last key it sees; likewise.
        SEED: int64 ``[batch]``; read only with ``DROP``.
        OUT: the output.
        LSE2: float32 ``[batch, heads, count]``, log2 of the sum of 2**(score / ln 2).
        q_b: strides of batch, head and position, and so on.
        q_h: stride.
        q_n: stride.
        k_b: stride.
        k_h: stride.
        k_n: stride.
        v_b: stride.
        v_h: stride.
        v_n: stride.
        o_b: stride.
        o_h: stride.
        o_n: stride.
        heads: local heads.
        count: length of a row.
        near: tiles fewer than this apart need the tables.
        scale2: scale of the scores / ln 2.
        threshold: ``dropout_bits.drop_threshold``.
        keep_scale: ``dropout_bits.keep_scale``.
        head_offset: global index of the first local head.
        unpack_scale: what products with the tables are to be multiplied by; only with ``HALF``.
        B: tile size.
        D: head size.
        C2P: whether there is the content-to-position term.
        P2C: whether there is the position-to-content term.
        HALF: products with the tables fit float16.
        FAR: whether some tiles lie beyond the table.
        RANGES: whether queries see only a range of the keys.
        EVEN: the length is a multiple of the tile size.
        DROP: whether there is dropout.
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
    KEY_TABLE += head * (2 * near * B) * D
    QUERY_TABLE += head * (2 * near * B) * D
    ends = pair.to(tl.int64) * 2 * count

    within = tl.arange(0, B)
    at = tile * B + within
    q = rows_of(Q, q_n, tile * B, count, EVEN, B, D)
    low = tl.zeros([B], tl.int32)
    high = tl.full([B], 0, tl.int32) + count
    if RANGES:
        low = tl.load(LOW + batch * count + at, mask=at < count, other=0)
        high = tl.load(HIGH + batch * count + at, mask=at < count, other=0)
    row_key = at.to(tl.uint32)
    if DROP:
        row_key = mix32(head_state(SEED, batch, head + head_offset) ^ row_key)
    begin, end = visible_tiles(
        LOW + batch * count, HIGH + batch * count, tile, count, tiles, RANGES, B
    )
    near_begin = tl.maximum(begin, tile - near + 1)
    near_end = tl.minimum(end, tile + near)

    peak = tl.full([B], float("-inf"), tl.float32)
    total = tl.zeros([B], tl.float32)
    mixed = tl.zeros([B, D], tl.float32)

    if FAR:
        # Side 0: keys far before the queries; side 1: far behind.
        for side in tl.static_range(2):
            q_end = tl.zeros([B], tl.float32)
            if C2P:
                q_end = tl.load(Q_ENDS + ends + (1 - side) * count + at, mask=at < count, other=0.0)
            far_begin = begin if side == 0 else tl.maximum(begin, near_end)
            far_end = tl.minimum(end, near_begin) if side == 0 else end
            for key_tile in range(far_begin, far_end):
                key = key_tile * B + within
                k = rows_of(K, k_n, key_tile * B, count, EVEN, B, D)
                v = rows_of(V, v_n, key_tile * B, count, EVEN, B, D)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") + q_end[:, None]
                if P2C:
                    k_end = tl.load(K_ENDS + ends + side * count + key, mask=key < count, other=0.0)
                    scores += k_end[None, :]
                peak, total, mixed = softmax_step(
                    scores, v, peak, total, mixed, key_tile * B, low, high, row_key, scale2,
                    threshold, MASKED, DROP, B,
                )  # fmt: skip

    # Blocks of the tables for the distances of the tiles, of which one is new at each step.
    block = tl.maximum(tile - near_begin + near, 0) * B  # nothing reads it where there is no tile
    # Kept from tile to tile in the precision in which it will be rotated: half the registers.
    q_high = tl.zeros([B, B], tl.float16 if HALF else tl.float32)
    if C2P:
        rows = rows_of(KEY_TABLE, D, block, 0, True, B, D)
        q_high = tl.dot(q, tl.trans(rows), input_precision="ieee").to(q_high.dtype)
    for key_tile in range(near_begin, near_end):
        key = key_tile * B + within
        k = rows_of(K, k_n, key_tile * B, count, EVEN, B, D)
        v = rows_of(V, v_n, key_tile * B, count, EVEN, B, D)
        block = (tile - key_tile + near) * B
        zero = hidden_zero(count, key_tile)
        q_terms = q_high
        k_terms = q_high
        if C2P:
            rows = rows_of(KEY_TABLE, D, block - B, 0, True, B, D)
            q_low = tl.dot(q, tl.trans(rows), input_precision="ieee").to(q_high.dtype)
            q_terms = own_terms(q_high, q_low, zero, HALF, B)
            q_high = q_low
        if P2C:
            rows = rows_of(QUERY_TABLE, D, 2 * near * B - block, 0, True, B, D)
            k_high = tl.dot(k, tl.trans(rows), input_precision="ieee")
            rows = rows_of(QUERY_TABLE, D, 2 * near * B - block - B, 0, True, B, D)
            k_low = tl.dot(k, tl.trans(rows), input_precision="ieee")
            k_terms = own_terms(k_high, k_low, zero, HALF, B)
        # As the product's starting value the bias takes the product's layout, in which a row
        # belongs to one warp; without, the row maximum would cross warps.
        bias = position_bias(q_terms, k_terms, zero, unpack_scale, C2P, P2C, HALF, B)
        scores = tl.dot(q, tl.trans(k), bias, input_precision="ieee")
        peak, total, mixed = softmax_step(
            scores, v, peak, total, mixed, key_tile * B, low, high, row_key, scale2, threshold,
            MASKED, DROP, B,
        )  # fmt: skip

    dead = total == 0.0
    factor = tl.where(dead, 0.0, keep_scale / tl.where(dead, 1.0, total))
    lse2 = tl.where(dead, float("-inf"), peak + tl.math.log2(tl.where(dead, 1.0, total)))
    zero = hidden_zero(count, near_end)  # kept over the loops, indices would take registers
    at = tile * B + within + zero
    out = OUT + (batch + zero) * o_b + (head + zero) * o_h + at[:, None] * o_n
    out += tl.arange(0, D)[None, :]
    mixed = mixed * factor[:, None]
    tl.store(out, mixed.to(OUT.dtype.element_ty), mask=(at < count)[:, None])
    tl.store(LSE2 + pair.to(tl.int64) * count + at, lse2, mask=at < count)

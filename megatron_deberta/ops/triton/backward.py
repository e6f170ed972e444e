"""The backward kernels of queries, keys and values, and the band of score gradients they share.

``key_kernel`` computes the scores again, gives dV, and writes the gradient dS of the scores of
each near tile, once, to the band; what far tiles give comes from ``far``. From the band,
``key_gradient_kernel`` gives dK, ``query_gradient_kernel`` dQ, and ``table_gradient_kernel``
(``table_gradients``) the gradients of the tables. Every sum has one owner and one order:
two passes give the same bits.

The rotation of ``tiles`` is its own inverse: the rotated dS holds in column w the gradient
of the product with row w of block m (w <= row) or of block m - 1. Neighbouring tiles share a
block, so the halves that belong to it are put together and cost one product.

The band is ``[batch * heads, key tiles, width, B, B]``, a tile of keys by queries; the tile of
query tile i is entry i mod width, with width enough for all near tiles of a key tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_deberta.ops.triton.tiles import (
    head_state,
    hidden_zero,
    in_high_block,
    keep_tile,
    keep_tile_by_key,
    mix32,
    numbers_of,
    own_terms,
    position_bias,
    rotate,
    rows_of,
    visible_tiles,
)


@triton.jit
def output_products_kernel(
    OUT, D_OUT, DELTA, o_b, o_h, o_n, g_b, g_h, g_n, heads, count, B: tl.constexpr, D: tl.constexpr
):
    """Products of the output with its gradient, float32 ``[batch, heads, count]``.

    Args:
        OUT: ``[batch, heads, count, D]`` of strides ``o_b``, ``o_h``, ``o_n``.
        D_OUT: its gradient, of strides ``g_b``, ``g_h``, ``g_n``.
        DELTA: the products.
        o_b: stride.
        o_h: stride.
        o_n: stride.
        g_b: stride.
        g_h: stride.
        g_n: stride.
        heads: number of heads.
        count: length of a row.
        B: positions of a program.
        D: head size.
    """
    tiles = tl.cdiv(count, B)
    pair = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles) * B
    batch = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    out = rows_of(OUT + batch * o_b + head * o_h, o_n, first, count, False, B, D)
    d_out = rows_of(D_OUT + batch * g_b + head * g_h, g_n, first, count, False, B, D)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    at = first + tl.arange(0, B)
    tl.store(DELTA + pair.to(tl.int64) * count + at, delta, mask=at < count)


@triton.jit
def signed_probabilities(
    scores, lse2, seen, row_key, first_key, scale2, threshold,
    BY_KEY: tl.constexpr, MASKED: tl.constexpr, DROP: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Probabilities, negative where dropout drops: one register an element for both.

    Args:
        scores: unscaled, float32 ``[B, B]``.
        lse2: log2-sum-exp2 of the queries ``[B]``.
        seen: what is visible, like ``scores``; read only with ``MASKED``.
        row_key: dropout hash of the queries, uint32 ``[B]``.
        first_key: position of the tile's first key.
        scale2: scale of the scores / ln 2.
        threshold: ``dropout_bits.drop_threshold``.
        BY_KEY: keys are the tile's rows; else queries.
        MASKED: whether anything is hidden.
        DROP: whether there is dropout.
        B: tile size.
    """
    lse2 = lse2[None, :] if BY_KEY else lse2[:, None]
    p = tl.math.exp2(scores * scale2 - lse2)
    if MASKED:
        p = tl.where(seen, p, 0.0)
    if DROP:
        if BY_KEY:
            keep = keep_tile_by_key(row_key, first_key, threshold, B)
        else:
            keep = keep_tile(row_key, first_key, threshold, B)
        p = tl.where(keep, p, -p)
    return p


@triton.jit
def score_gradient(signed, products, delta, keep_scale, DROP: tl.constexpr):
    """Gradient of the scores before their scale.

    Args:
        signed: ``signed_probabilities``.
        products: products of the output's gradient with the values.
        delta: products of the output with its gradient, of the queries.
        keep_scale: ``dropout_bits.keep_scale``.
        DROP: whether there is dropout.
    """
    if DROP:
        products = tl.where(signed > 0, products * keep_scale, 0.0)
    return tl.abs(signed) * (products - delta)


@triton.jit
def own_range(LOW, HIGH, at, count, RANGES: tl.constexpr):
    """What the positions of a tile see, or are seen by: first, and one past the last."""
    low = at * 0
    high = tl.where(at < count, count, 0)
    if RANGES:
        low = tl.load(LOW + at, mask=at < count, other=0)
        high = tl.load(HIGH + at, mask=at < count, other=0)
    return low, high


@triton.jit
def hash_rows(SEED, at, batch, head, DROP: tl.constexpr):
    """The dropout hash of some queries."""
    row_key = at.to(tl.uint32)
    if DROP:
        row_key = mix32(head_state(SEED, batch, head) ^ row_key)
    return row_key


@triton.jit
def key_kernel(
    Q,
    K,
    V,
    D_OUT,
    KEY_TABLE,
    QUERY_TABLE,
    SEEN_LOW,
    SEEN_HIGH,
    SEED,
    LSE2,
    DELTA,
    D_V,
    BAND,
    D_V_FAR,
    q_b, q_h, q_n: tl.constexpr, k_b, k_h, k_n: tl.constexpr, v_b, v_h, v_n: tl.constexpr,
    g_b, g_h, g_n: tl.constexpr, dv_b, dv_h, dv_n: tl.constexpr,
    heads,
    count,
    near,
    width,
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
    SCORES: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """DV of a tile of keys, and its band of dS.

    Arguments are those of ``forward.forward_kernel``, and:

    Args:
        D_OUT: gradient of the output, strides ``g_*``.
        SEEN_LOW: first query that sees a key, int32 ``[batch, count]``; only with ``RANGES``.
        SEEN_HIGH: one past the last; likewise.
        LSE2: of the forward pass.
        DELTA: ``output_products_kernel``.
        D_V: gradient of the values, strides ``dv_*``.
        BAND: dS of near tiles.
        D_V_FAR: float32 ``[batch, heads, count, D]``, what far queries gave; only with ``FAR``.
        width: query tiles of a key tile's band.
        SCORES: computes the probabilities; else finds them in the band.
        VALUES: goes on to dV and dS; else leaves the probabilities in the band.
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
    KEY_TABLE += head * (2 * near * B) * D
    QUERY_TABLE += head * (2 * near * B) * D
    BAND += (pair.to(tl.int64) * tiles + tile) * width * (B * B)
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
    if FAR:
        far = D_V_FAR + row * D + key[:, None] * D + columns[None, :]
        d_v = tl.load(far, mask=(key < count)[:, None], other=0.0)

    # Kept from tile to tile in the precision in which it will be rotated: half the registers.
    k_high = tl.zeros([B, B], tl.float16 if HALF else tl.float32)
    if P2C:
        block = tl.maximum(near - near_begin + tile, 0)  # nothing reads it where there is no tile
        rows = rows_of(QUERY_TABLE, D, block * B, 0, True, B, D)
        k_high = tl.dot(k, tl.trans(rows), input_precision="ieee").to(k_high.dtype)
    for query_tile in range(near_begin, near_end):
        at = query_tile * B + within
        q = rows_of(Q, q_n, query_tile * B, count, EVEN, B, D)
        d_out = rows_of(D_OUT, g_n, query_tile * B, count, EVEN, B, D)
        zero = hidden_zero(count, query_tile)
        if SCORES:
            block = (query_tile - tile + near) * B
            q_terms = k_high
            k_terms = k_high
            if C2P:
                rows = rows_of(KEY_TABLE, D, block, 0, True, B, D)
                q_high = tl.dot(q, tl.trans(rows), input_precision="ieee")
                rows = rows_of(KEY_TABLE, D, block - B, 0, True, B, D)
                q_low = tl.dot(q, tl.trans(rows), input_precision="ieee")
                q_terms = own_terms(q_high, q_low, zero, HALF, B)
            if P2C:
                rows = rows_of(QUERY_TABLE, D, 2 * near * B - block - B, 0, True, B, D)
                k_low = tl.dot(k, tl.trans(rows), input_precision="ieee").to(k_high.dtype)
                k_terms = own_terms(k_high, k_low, zero, HALF, B)
                k_high = k_low
            bias = position_bias(k_terms, q_terms, zero, unpack_scale, P2C, C2P, HALF, B)
            # Loaded where it is used: earlier, it would take registers from the products above.
            lse2 = numbers_of(LSE2 + row, query_tile * B + zero, count, EVEN, B)
            scores = tl.dot(k, tl.trans(q), bias, input_precision="ieee")
            first_seen, end_seen = low - query_tile * B, high - query_tile * B
            seen = (within[None, :] >= first_seen[:, None]) & (within[None, :] < end_seen[:, None])
            row_key = hash_rows(SEED, at, batch, head + head_offset, DROP)
            signed = signed_probabilities(
                scores, lse2, seen, row_key, tile * B, scale2, threshold,
                True, MASKED, DROP, B,
            )  # fmt: skip
        else:
            place = BAND + (query_tile % width) * (B * B)
            signed = tl.load(place + within[:, None] * B + within[None, :]).to(tl.float32)
        stored = signed
        if VALUES:
            kept = tl.maximum(signed, 0.0).to(dtype)
            d_v = tl.dot(kept, d_out, d_v, input_precision="ieee")
            delta = numbers_of(DELTA + row, query_tile * B + zero, count, EVEN, B)
            products = tl.dot(v, tl.trans(d_out), input_precision="ieee")
            stored = score_gradient(signed, products, delta[None, :], keep_scale, DROP)
        place = BAND + (query_tile % width) * (B * B)
        tl.store(place + within[:, None] * B + within[None, :], stored.to(dtype))

    if VALUES:
        zero = hidden_zero(count, near_end)
        key = tile * B + within + zero
        D_V += (batch + zero) * dv_b + (head + zero) * dv_h
        out = D_V + key[:, None] * dv_n + columns[None, :]
        tl.store(out, (d_v * keep_scale).to(D_V.dtype.element_ty), mask=(key < count)[:, None])


@triton.jit
def key_gradient_kernel(
    Q,
    QUERY_TABLE,
    SEEN_LOW,
    SEEN_HIGH,
    BAND,
    D_K_FAR,
    D_K,
    q_b, q_h, q_n: tl.constexpr, dk_b, dk_h, dk_n: tl.constexpr,
    heads,
    count,
    near,
    width,
    scale,
    B: tl.constexpr,
    D: tl.constexpr,
    P2C: tl.constexpr,
    FAR: tl.constexpr,
    RANGES: tl.constexpr,
    EVEN: tl.constexpr,
    CONTENT: tl.constexpr,
):  # fmt: skip
    """DK of a tile of keys: from the band, and what ``far_key_kernel`` found.

    Arguments are those of ``key_kernel``, and ``D_K``, the gradient of the keys, strides
    ``dk_*``; ``scale`` is that of the scores. Without ``CONTENT`` only the table's part is wanted.
    """
    tiles = tl.cdiv(count, B)
    pair = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    batch = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    Q += batch * q_b + head * q_h
    D_K += batch * dk_b + head * dk_h
    QUERY_TABLE += head * (2 * near * B) * D
    BAND += (pair.to(tl.int64) * tiles + tile) * width * (B * B)
    dtype = Q.dtype.element_ty

    within = tl.arange(0, B)
    columns = tl.arange(0, D)
    key = tile * B + within
    begin, end = visible_tiles(
        SEEN_LOW + batch * count, SEEN_HIGH + batch * count, tile, count, tiles, RANGES, B
    )
    near_begin = tl.maximum(begin, tile - near + 1)
    near_end = tl.minimum(end, tile + near)
    d_k = tl.zeros([B, D], tl.float32)
    if FAR:
        far = D_K_FAR + pair.to(tl.int64) * count * D + key[:, None] * D + columns[None, :]
        d_k = tl.load(far, mask=(key < count)[:, None], other=0.0)
    before = tl.zeros([B, B], dtype)
    for query_tile in range(near_begin, near_end):
        place = BAND + (query_tile % width) * (B * B)
        d_scores = tl.load(place + within[:, None] * B + within[None, :])
        if CONTENT:
            q = rows_of(Q, q_n, query_tile * B, count, EVEN, B, D)
            d_k = tl.dot(d_scores, q, d_k, input_precision="ieee")
        if P2C:
            zero = hidden_zero(count, query_tile)
            high = in_high_block(zero, B)
            turned = rotate(d_scores, zero, B)
            rows = rows_of(QUERY_TABLE, D, (near - query_tile + tile) * B, 0, True, B, D)
            d_k = tl.dot(tl.where(high, turned, before), rows, d_k, input_precision="ieee")
            before = turned
    if P2C:
        block = tl.minimum(near - near_end + tile, 2 * near - 1)  # it has nothing to add if empty
        rows = rows_of(QUERY_TABLE, D, block * B, 0, True, B, D)
        high = in_high_block(hidden_zero(count, near_end), B)
        left = tl.where(high, 0.0, before).to(dtype)
        d_k = tl.dot(left, rows, d_k, input_precision="ieee")
    out = D_K + key[:, None] * dk_n + columns[None, :]
    tl.store(out, (d_k * scale).to(D_K.dtype.element_ty), mask=(key < count)[:, None])


@triton.jit
def query_gradient_kernel(
    Q,
    K,
    V,
    D_OUT,
    KEY_TABLE,
    Q_ENDS,
    K_ENDS,
    LOW,
    HIGH,
    SEED,
    LSE2,
    DELTA,
    BAND,
    D_Q,
    Q_SUMS,
    q_b, q_h, q_n: tl.constexpr, k_b, k_h, k_n: tl.constexpr, v_b, v_h, v_n: tl.constexpr,
    g_b, g_h, g_n: tl.constexpr, dq_b, dq_h, dq_n: tl.constexpr,
    heads,
    count,
    near,
    width,
    scale,
    scale2,
    threshold,
    keep_scale,
    head_offset,
    B: tl.constexpr,
    D: tl.constexpr,
    C2P: tl.constexpr,
    P2C: tl.constexpr,
    FAR: tl.constexpr,
    RANGES: tl.constexpr,
    EVEN: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    """DQ of a tile of queries: near tiles from the band, far ones computed again.

    Computing far tiles twice (here and in ``far_key_kernel``) is the price of a fixed order.
    Arguments are those of ``key_kernel`` and ``forward_kernel``, and ``D_Q``, the gradient of the
    queries, strides ``dq_*``; ``Q_SUMS``, float32 ``[batch, heads, 2, count]``, dS summed over the
    far keys that take the first and the last row of ``KEY_TABLE``.
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
    KEY_TABLE += head * (2 * near * B) * D
    BAND += pair.to(tl.int64) * tiles * width * (B * B)
    row = pair.to(tl.int64) * count
    dtype = K.dtype.element_ty

    within = tl.arange(0, B)
    columns = tl.arange(0, D)
    at = tile * B + within
    begin, end = visible_tiles(
        LOW + batch * count, HIGH + batch * count, tile, count, tiles, RANGES, B
    )
    near_begin = tl.maximum(begin, tile - near + 1)
    near_end = tl.minimum(end, tile + near)
    d_q = tl.zeros([B, D], tl.float32)

    before = tl.zeros([B, B], dtype)
    for key_tile in range(near_begin, near_end):
        k = rows_of(K, k_n, key_tile * B, count, EVEN, B, D)
        place = BAND + (key_tile * width + tile % width) * (B * B)
        d_scores = tl.trans(tl.load(place + within[:, None] * B + within[None, :]))
        d_q = tl.dot(d_scores, k, d_q, input_precision="ieee")
        if C2P:
            zero = hidden_zero(count, key_tile)
            high_block = in_high_block(zero, B)
            turned = rotate(d_scores, zero, B)
            rows = rows_of(KEY_TABLE, D, (tile - key_tile + near) * B, 0, True, B, D)
            d_q = tl.dot(tl.where(high_block, turned, before), rows, d_q, input_precision="ieee")
            before = turned
    if C2P:
        block = tl.minimum(tile - near_end + near, 2 * near - 1)  # it has nothing to add if empty
        rows = rows_of(KEY_TABLE, D, block * B, 0, True, B, D)
        high_block = in_high_block(hidden_zero(count, near_end), B)
        left = tl.where(high_block, 0.0, before).to(dtype)
        d_q = tl.dot(left, rows, d_q, input_precision="ieee")

    if FAR:
        q = rows_of(Q, q_n, tile * B, count, EVEN, B, D)
        d_out = rows_of(D_OUT, g_n, tile * B, count, EVEN, B, D)
        lse2 = numbers_of(LSE2 + row, tile * B, count, EVEN, B)
        delta = numbers_of(DELTA + row, tile * B, count, EVEN, B)
        row_key = hash_rows(SEED, at, batch, head + head_offset, DROP)
        low, high = own_range(LOW + batch * count, HIGH + batch * count, at, count, RANGES)
        # Side 0: keys far before the queries; side 1: far behind.
        for side in tl.static_range(2):
            q_end = tl.zeros([B], tl.float32)
            if C2P:
                q_end = tl.load(
                    Q_ENDS + 2 * row + (1 - side) * count + at, mask=at < count, other=0.0
                )
            sums = tl.zeros([B], tl.float32)
            far_begin = begin if side == 0 else tl.maximum(begin, near_end)
            far_end = tl.minimum(end, near_begin) if side == 0 else end
            for key_tile in range(far_begin, far_end):
                key = key_tile * B + within
                k = rows_of(K, k_n, key_tile * B, count, EVEN, B, D)
                v = rows_of(V, v_n, key_tile * B, count, EVEN, B, D)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") + q_end[:, None]
                if P2C:
                    k_end = tl.load(
                        K_ENDS + 2 * row + side * count + key, mask=key < count, other=0.0
                    )
                    scores += k_end[None, :]
                products = tl.dot(d_out, tl.trans(v), input_precision="ieee")
                seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
                signed = signed_probabilities(
                    scores, lse2, seen, row_key, key_tile * B, scale2, threshold,
                    False, MASKED, DROP, B,
                )  # fmt: skip
                d_scores = score_gradient(signed, products, delta[:, None], keep_scale, DROP)
                d_q = tl.dot(d_scores.to(dtype), k, d_q, input_precision="ieee")
                sums += tl.sum(d_scores, 1)
            if C2P:
                end_row = KEY_TABLE + (1 - side) * (2 * near * B - 1) * D + columns
                d_q += sums[:, None] * tl.load(end_row).to(tl.float32)[None, :]
                tl.store(Q_SUMS + 2 * row + (1 - side) * count + at, sums, mask=at < count)
    zero = hidden_zero(count, near_end)
    at = tile * B + within + zero
    out = D_Q + (batch + zero) * dq_b + (head + zero) * dq_h + at[:, None] * dq_n + columns[None, :]
    tl.store(out, (d_q * scale).to(D_Q.dtype.element_ty), mask=(at < count)[:, None])

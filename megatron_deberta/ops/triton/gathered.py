"""The kernels of gathered queries, which stand anywhere: the mask decoder's, against all keys.

A query and a key p - j apart need row t = p - j + reach of the linear tables, with t held within
the table. The rows a tile needs lie in a few neighbouring blocks, few where queries stand in rising
order; a tile takes one block after the other, multiplies by it, and gathers what lies in it.
Positions may repeat and stand in any order.

Gradients leave in two forms, neither of them queries by keys. dS by query and row of the table
goes to ``[queries, rows]`` sums, from which ordinary products give what belongs to the tables'
keys. dS by key and *position* goes to the band of ``backward``: a product with
the matrix that says which query stands where turns a tile of queries into one of positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_deberta.ops.triton.backward import hash_rows, score_gradient, signed_probabilities
from megatron_deberta.ops.triton.forward import softmax_step
from megatron_deberta.ops.triton.tiles import rows_of


@triton.jit
def gathered_bias(
    q,
    k,
    t,
    KEY_TABLE,
    QUERY_TABLE,
    first_block,
    last_block,
    C2P: tl.constexpr,
    P2C: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
):
    """Position terms of a tile of queries and keys, float32 ``[B, B]``.

    Args:
        q: queries ``[B, D]``.
        k: keys ``[B, D]``.
        t: rows of the tables, int32 ``[B, B]``.
        KEY_TABLE: of the head, one row a distance.
        QUERY_TABLE: likewise, of the distances the keys' term takes.
        first_block: block of the least row.
        last_block: block of the greatest.
        C2P: whether there is the content-to-position term.
        P2C: whether there is the position-to-content term.
        B: tile size.
        D: head size.
    """
    bias = tl.zeros([B, B], tl.float32)
    column = t & (B - 1)
    for block in range(first_block, last_block + 1):
        term = tl.zeros([B, B], tl.float32)
        if C2P:
            rows = rows_of(KEY_TABLE, D, block * B, 0, True, B, D)
            product = tl.dot(q, tl.trans(rows), input_precision="ieee")
            term += tl.gather(product, column, 1)
        if P2C:
            rows = rows_of(QUERY_TABLE, D, block * B, 0, True, B, D)
            product = tl.dot(k, tl.trans(rows), input_precision="ieee")
            term += tl.trans(tl.gather(product, tl.trans(column), 1))
        bias += tl.where(t // B == block, term, 0.0)
    return bias


@triton.jit
def table_rows(at, key, near, B: tl.constexpr):
    """Row of the linear tables for each query and key, unbounded and held within the tables."""
    t = at[:, None] - key[None, :] + near * B
    return t, tl.minimum(tl.maximum(t, 0), 2 * near * B - 1)


@triton.jit
def block_span(at, key_tile, near, B: tl.constexpr):
    """First and last block of the tables that queries at ``at`` need for a tile of keys."""
    limit = 2 * near - 1
    farthest = tl.max(at, 0)
    nearest = tl.min(tl.where(at < 0, farthest, at), 0)
    first = nearest - key_tile * B - B + 1 + near * B
    last = farthest - key_tile * B + near * B
    first = tl.minimum(tl.maximum(first, 0) // B, limit)
    last = tl.minimum(tl.maximum(last, 0) // B, limit)
    return first, tl.where(farthest < 0, first - 1, last)


@triton.jit
def gathered_forward_kernel(
    Q, K, V, KEY_TABLE, QUERY_TABLE, AT, LOW, HIGH, SEED, OUT, LSE2,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    heads,
    queries,
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
    DROP: tl.constexpr,
):  # fmt: skip
    """Output and log2-sum-exp2 of a tile of gathered queries.

    Arguments are those of ``forward.forward_kernel``, but both tables hold distances as
    they are, and:

    Args:
        AT: where the queries stand, int32 ``[batch, queries]``, -1 for padding.
        LOW: first key a query sees, int32 ``[batch, queries]``.
        HIGH: one past the last; 0 for padding.
        queries: gathered queries of a row.
        count: keys of a row.
    """
    tiles = tl.cdiv(queries, B)
    pair = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    batch = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    KEY_TABLE += head * (2 * near * B) * D
    QUERY_TABLE += head * (2 * near * B) * D
    place = tile * B + tl.arange(0, B)
    q = rows_of(Q + batch * q_b + head * q_h, q_n, tile * B, queries, False, B, D)
    at = tl.load(AT + batch * queries + place, mask=place < queries, other=-1)
    low = tl.load(LOW + batch * queries + place, mask=place < queries, other=0)
    high = tl.load(HIGH + batch * queries + place, mask=place < queries, other=0)
    row_key = hash_rows(SEED, at, batch, head + head_offset, DROP)

    peak = tl.full([B], float("-inf"), tl.float32)
    total = tl.zeros([B], tl.float32)
    mixed = tl.zeros([B, D], tl.float32)
    end = tl.max(high, 0)
    begin = tl.min(tl.where(low < high, low, end), 0)
    for key_tile in range(begin // B, tl.cdiv(end, B)):
        key = key_tile * B + tl.arange(0, B)
        k = rows_of(K, k_n, key_tile * B, count, False, B, D)
        v = rows_of(V, v_n, key_tile * B, count, False, B, D)
        _, t = table_rows(at, key, near, B)
        first, last = block_span(at, key_tile, near, B)
        bias = gathered_bias(q, k, t, KEY_TABLE, QUERY_TABLE, first, last, C2P, P2C, B, D)
        scores = tl.dot(q, tl.trans(k), bias, input_precision="ieee")
        peak, total, mixed = softmax_step(
            scores, v, peak, total, mixed, key_tile * B, low, high, row_key, scale2, threshold,
            True, DROP, B,
        )  # fmt: skip
    dead = total == 0.0
    factor = tl.where(dead, 0.0, keep_scale / tl.where(dead, 1.0, total))
    lse2 = tl.where(dead, float("-inf"), peak + tl.math.log2(tl.where(dead, 1.0, total)))
    out = OUT + batch * o_b + head * o_h + place[:, None] * o_n + tl.arange(0, D)[None, :]
    mixed = (mixed * factor[:, None]).to(OUT.dtype.element_ty)
    tl.store(out, mixed, mask=(place < queries)[:, None])
    tl.store(LSE2 + pair.to(tl.int64) * queries + place, lse2, mask=place < queries)


@triton.jit
def gathered_query_kernel(
    Q, K, V, D_OUT, KEY_TABLE, QUERY_TABLE, AT, LOW, HIGH, SEED, LSE2, DELTA, D_Q, BY_ROW,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n,
    heads,
    queries,
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
    DROP: tl.constexpr,
):  # fmt: skip
    """What gathered queries take from the keys, and dS by row of the table of keys.

    Arguments are those of ``gathered_forward_kernel`` and ``backward.key_kernel``, and:

    Args:
        D_Q: float32 ``[batch, heads, queries, D]``: dQ before its scale, less the table's part.
        BY_ROW: float32 ``[batch, heads, queries, 2 * near * B]``, zero at first: dS of each query
            by the row of the table it used, all far keys in the rows at the ends.
    """
    tiles = tl.cdiv(queries, B)
    pair = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    batch = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    KEY_TABLE += head * (2 * near * B) * D
    QUERY_TABLE += head * (2 * near * B) * D
    place = tile * B + tl.arange(0, B)
    row = pair.to(tl.int64) * queries
    q = rows_of(Q + batch * q_b + head * q_h, q_n, tile * B, queries, False, B, D)
    d_out = rows_of(D_OUT + batch * g_b + head * g_h, g_n, tile * B, queries, False, B, D)
    at = tl.load(AT + batch * queries + place, mask=place < queries, other=-1)
    low = tl.load(LOW + batch * queries + place, mask=place < queries, other=0)
    high = tl.load(HIGH + batch * queries + place, mask=place < queries, other=0)
    lse2 = tl.load(LSE2 + row + place, mask=place < queries, other=0.0)
    delta = tl.load(DELTA + row + place, mask=place < queries, other=0.0)
    row_key = hash_rows(SEED, at, batch, head + head_offset, DROP)
    by_row = BY_ROW + (row + tile * B) * (2 * near * B)
    row_offset = tl.arange(0, B)[:, None] * (2 * near * B)

    d_q = tl.zeros([B, D], tl.float32)
    behind = tl.zeros([B], tl.float32)
    before = tl.zeros([B], tl.float32)
    end = tl.max(high, 0)
    begin = tl.min(tl.where(low < high, low, end), 0)
    for key_tile in range(begin // B, tl.cdiv(end, B)):
        key = key_tile * B + tl.arange(0, B)
        k = rows_of(K, k_n, key_tile * B, count, False, B, D)
        v = rows_of(V, v_n, key_tile * B, count, False, B, D)
        free, t = table_rows(at, key, near, B)
        first, last = block_span(at, key_tile, near, B)
        bias = gathered_bias(q, k, t, KEY_TABLE, QUERY_TABLE, first, last, C2P, P2C, B, D)
        scores = tl.dot(q, tl.trans(k), bias, input_precision="ieee")
        products = tl.dot(d_out, tl.trans(v), input_precision="ieee")
        seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        signed = signed_probabilities(
            scores, lse2, seen, row_key, key_tile * B, scale2, threshold,
            False, True, DROP, B,
        )  # fmt: skip
        d_scores = score_gradient(signed, products, delta[:, None], keep_scale, DROP)
        d_q = tl.dot(d_scores.to(k.dtype), k, d_q, input_precision="ieee")
        if C2P:
            # Rows inside the table stand for one distance, so each is written at most once.
            inside = seen & (free > 0) & (free < 2 * near * B - 1)
            tl.store(by_row + (row_offset + t), d_scores, mask=inside)
            behind += tl.sum(tl.where(free >= 2 * near * B - 1, d_scores, 0.0), 1)
            before += tl.sum(tl.where(free <= 0, d_scores, 0.0), 1)
    if C2P:
        ends = BY_ROW + (row + place) * (2 * near * B)
        tl.store(ends, before, mask=place < queries)
        tl.store(ends + 2 * near * B - 1, behind, mask=place < queries)
    out = D_Q + (row + place)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out, d_q, mask=(place < queries)[:, None])


@triton.jit
def gathered_key_kernel(
    Q, K, V, D_OUT, KEY_TABLE, QUERY_TABLE, AT, LOW, HIGH, SEED, LSE2, DELTA, D_V, D_K, BAND,
    K_SUMS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n, dv_b, dv_h, dv_n,
    heads,
    queries,
    count,
    near,
    width,
    scale2,
    threshold,
    keep_scale,
    head_offset,
    B: tl.constexpr,
    D: tl.constexpr,
    C2P: tl.constexpr,
    P2C: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    """What the keys of a tile take from gathered queries, and their band by position.

    Arguments are those of ``gathered_query_kernel`` and ``backward.key_kernel``, and:

    Args:
        D_K: float32 ``[batch, heads, count, D]``: dK before its scale, less what the band gives.
        BAND: as ``backward`` lays it out, by position instead of query; zero at first.
        K_SUMS: float32 ``[batch, heads, 2, count]``, dS summed over queries too far for the band.
    """
    tiles = tl.cdiv(count, B)
    pair = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    batch = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    Q += batch * q_b + head * q_h
    D_OUT += batch * g_b + head * g_h
    KEY_TABLE += head * (2 * near * B) * D
    QUERY_TABLE += head * (2 * near * B) * D
    BAND += (pair.to(tl.int64) * tiles + tile) * width * (B * B)
    row = pair.to(tl.int64) * queries
    dtype = Q.dtype.element_ty
    within = tl.arange(0, B)
    key = tile * B + within
    k = rows_of(K + batch * k_b + head * k_h, k_n, tile * B, count, False, B, D)
    v = rows_of(V + batch * v_b + head * v_h, v_n, tile * B, count, False, B, D)

    d_v = tl.zeros([B, D], tl.float32)
    d_k = tl.zeros([B, D], tl.float32)
    behind = tl.zeros([B], tl.float32)
    before = tl.zeros([B], tl.float32)
    for query_tile in range(0, tl.cdiv(queries, B)):
        place = query_tile * B + within
        q = rows_of(Q, q_n, query_tile * B, queries, False, B, D)
        d_out = rows_of(D_OUT, g_n, query_tile * B, queries, False, B, D)
        at = tl.load(AT + batch * queries + place, mask=place < queries, other=-1)
        low = tl.load(LOW + batch * queries + place, mask=place < queries, other=0)
        high = tl.load(HIGH + batch * queries + place, mask=place < queries, other=0)
        lse2 = tl.load(LSE2 + row + place, mask=place < queries, other=0.0)
        delta = tl.load(DELTA + row + place, mask=place < queries, other=0.0)
        row_key = hash_rows(SEED, at, batch, head + head_offset, DROP)
        _, t = table_rows(at, key, near, B)
        first, last = block_span(at, tile, near, B)
        bias = gathered_bias(q, k, t, KEY_TABLE, QUERY_TABLE, first, last, C2P, P2C, B, D)
        scores = tl.dot(k, tl.trans(q), tl.trans(bias), input_precision="ieee")
        seen = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])
        signed = signed_probabilities(
            scores, lse2, seen, row_key, tile * B, scale2, threshold,
            True, True, DROP, B,
        )  # fmt: skip
        kept = tl.maximum(signed, 0.0).to(dtype)
        d_v = tl.dot(kept, d_out, d_v, input_precision="ieee")
        products = tl.dot(v, tl.trans(d_out), input_precision="ieee")
        d_scores = score_gradient(signed, products, delta[None, :], keep_scale, DROP)
        d_k = tl.dot(d_scores.to(dtype), q, d_k, input_precision="ieee")
        if P2C:
            # Distance in tiles decides, as in the other kernels, so that band and sums share out.
            apart = at // B - tile
            behind += tl.sum(tl.where((apart >= near)[None, :], d_scores, 0.0), 1)
            before += tl.sum(tl.where((apart <= -near)[None, :], d_scores, 0.0), 1)
            farthest = tl.max(at, 0)
            nearest = tl.min(tl.where(at < 0, farthest, at), 0)
            position_begin = tl.maximum(nearest // B, tile - near + 1)
            position_end = tl.minimum(farthest // B, tile + near - 1) + 1
            for position_tile in range(position_begin, position_end):
                stands = at[:, None] == (position_tile * B + within)[None, :]
                turned = tl.dot(d_scores.to(dtype), stands.to(dtype), input_precision="ieee")
                pointers = BAND + (position_tile % width) * (B * B)
                pointers += within[:, None] * B + within[None, :]
                tl.debug_barrier()  # another warp may have written what this one adds to
                tl.store(pointers, (tl.load(pointers).to(tl.float32) + turned).to(dtype))
    if P2C:
        columns = tl.arange(0, D)
        # Distances fall along the table of negated ones, which these sums are for.
        sums = K_SUMS + pair.to(tl.int64) * 2 * count + key
        tl.store(sums, behind, mask=key < count)
        tl.store(sums + count, before, mask=key < count)
        far = tl.load(QUERY_TABLE + (2 * near * B - 1) * D + columns).to(tl.float32)
        d_k += behind[:, None] * far[None, :]
        d_k += before[:, None] * tl.load(QUERY_TABLE + columns).to(tl.float32)[None, :]
    place = key[:, None] * D + tl.arange(0, D)[None, :]
    d_k_rows = D_K + pair.to(tl.int64) * count * D + place
    tl.store(d_k_rows, d_k, mask=(key < count)[:, None])
    place = key[:, None] * dv_n + tl.arange(0, D)[None, :]
    d_v = (d_v * keep_scale).to(D_V.dtype.element_ty)
    tl.store(D_V + batch * dv_b + head * dv_h + place, d_v, mask=(key < count)[:, None])

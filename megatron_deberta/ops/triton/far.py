"""The kernels of far tiles, whose distances all lie beyond the position tables.

All distances of such a tile share one slot, that of the table's first or last row. Its scores are
q . k plus one number per query and one per key; the tables' gradients are sums of dS over queries
or keys, times vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_deberta.ops.triton.scores import (
    dropout_state,
    score_gradient,
    signed_probabilities,
    tile_pairs,
    visible_range,
)
from megatron_deberta.ops.triton.tiles import (
    dot,
    far_tiles,
    head_pointer,
    load_rows,
    load_vector,
    opaque_zero,
    program_tile,
    store_rows,
    visible_tiles,
)


@triton.jit
def end_products_kernel(
    X, TABLE, OUT, heads, length, last, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Multiply every vector by the first and the last row of a table.

    Args:
        X: ``HeadTensor`` of ``[batch, heads, length, HEAD_DIM]``.
        TABLE: ``[heads, last + 1, HEAD_DIM]``.
        OUT: float32 ``[batch, heads, 2, length]``.
        last: index of the table's last row.
        heads: number of heads.
        length: positions in a row.
        BLOCK: tile size.
        HEAD_DIM: features per head.
    """
    tile, pair, batch, head = program_tile(length, heads, BLOCK)
    pointer = head_pointer(X, batch, head)
    x = load_rows(pointer, X.row_stride, tile * BLOCK, length, False, BLOCK, HEAD_DIM)
    x = x.to(tl.float32)
    position = tile * BLOCK + tl.arange(0, BLOCK)
    for side in tl.static_range(2):
        row = TABLE + (head * (last + 1) + side * last) * HEAD_DIM + tl.arange(0, HEAD_DIM)
        products = tl.sum(x * tl.load(row).to(tl.float32)[None, :], 1)
        tl.store(OUT + (2 * pair + side) * length + position, products, mask=position < length)


@triton.jit
def far_key_kernel(
    Q, K, V, D_OUT, QUERY_TABLE, Q_ENDS, K_ENDS, QUERY_BEGIN, QUERY_END, LSE2, DELTA, D_V_FAR,
    D_K_FAR, K_SUMS, DROPOUT, heads, length, near, log2_scale,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr,
    RANGES: tl.constexpr, EVEN: tl.constexpr, DROP: tl.constexpr, VALUES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Compute what far queries contribute to dV, dK and the gradient of the table's ends.

    Arguments not listed are those of ``backward.key_kernel`` and ``forward.forward_kernel``.

    Args:
        D_V_FAR: float32 ``[batch, heads, length, HEAD_DIM]``, dV before the scale of dropout.
        D_K_FAR: float32 ``[batch, heads, length, HEAD_DIM]``, dK before the scale of the scores.
        K_SUMS: float32 ``[batch, heads, 2, length]``, dS summed over the far queries that use the
            first and the last row of QUERY_TABLE.
        VALUES: whether to compute dV.
        KEYS: whether to compute dK and the sums.
    """
    MASKED: tl.constexpr = RANGES or not EVEN
    tile, pair, batch, head = program_tile(length, heads, BLOCK)
    q_pointer = head_pointer(Q, batch, head)
    d_out_pointer = head_pointer(D_OUT, batch, head)
    QUERY_TABLE += head * (2 * near * BLOCK) * HEAD_DIM
    QUERY_BEGIN += batch * length
    QUERY_END += batch * length
    dtype = Q.pointer.dtype.element_ty

    first = tile * BLOCK
    key = first + tl.arange(0, BLOCK)
    k = load_rows(
        head_pointer(K, batch, head), K.row_stride, first, length, EVEN, BLOCK, HEAD_DIM
    )  # fmt: skip
    v = load_rows(
        head_pointer(V, batch, head), V.row_stride, first, length, EVEN, BLOCK, HEAD_DIM
    )  # fmt: skip
    state = dropout_state(DROPOUT, batch, head, DROP)
    query_begin, query_end = visible_range(QUERY_BEGIN, QUERY_END, key, length, RANGES)
    begin, end, near_begin, near_end = visible_tiles(
        QUERY_BEGIN, QUERY_END, tile, length, near, RANGES, BLOCK
    )
    d_v = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    d_k = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    # Of the linear tables, row 0 belongs to the queries after the keys.
    for side in tl.static_range(2):
        q_side = (2 * pair + 1 - side) * length
        k_side = (2 * pair + side) * length
        k_end = tl.zeros([BLOCK], tl.float32)
        if P2C:
            k_end = load_vector(K_ENDS + k_side, first, length, EVEN, BLOCK)
        sums = tl.zeros([BLOCK], tl.float32)
        far_begin, far_end = far_tiles(begin, end, near_begin, near_end, 1 - side)
        for query_tile in range(far_begin, far_end):
            first_query = query_tile * BLOCK
            query = first_query + tl.arange(0, BLOCK)
            q = load_rows(q_pointer, Q.row_stride, first_query, length, EVEN, BLOCK, HEAD_DIM)
            d_out = load_rows(
                d_out_pointer, D_OUT.row_stride, first_query, length, EVEN, BLOCK, HEAD_DIM
            )
            zero = opaque_zero(length, query_tile)
            scores = dot(k, tl.trans(q)) + k_end[:, None]
            if C2P:
                q_end = load_vector(Q_ENDS + q_side, first_query + zero, length, EVEN, BLOCK)
                scores += q_end[None, :]
            visible = query[None, :] >= query_begin[:, None]
            visible = visible & (query[None, :] < query_end[:, None])
            # Loaded where they are used: earlier, they would take registers from the products.
            lse2 = load_vector(LSE2 + pair * length, first_query + zero, length, EVEN, BLOCK)
            signed = signed_probabilities(
                scores, lse2, visible, state, tile_pairs(first_query, BLOCK), first, log2_scale,
                DROPOUT,
                True, MASKED, DROP, BLOCK,
            )  # fmt: skip
            if VALUES:
                d_v = dot(tl.maximum(signed, 0.0).to(dtype), d_out, d_v)
            if KEYS:
                delta = load_vector(DELTA + pair * length, first_query + zero, length, EVEN, BLOCK)
                products = dot(v, tl.trans(d_out))
                d_scores = score_gradient(
                    signed, products, delta[None, :], DROPOUT.keep_scale, DROP
                )
                d_k = dot(d_scores.to(dtype), q, d_k)
                sums += tl.sum(d_scores, 1)
        if KEYS and P2C:
            end_row = QUERY_TABLE + side * (2 * near * BLOCK - 1) * HEAD_DIM
            end_row = tl.load(end_row + tl.arange(0, HEAD_DIM)).to(tl.float32)
            d_k += sums[:, None] * end_row[None, :]
            tl.store(K_SUMS + k_side + key, sums, mask=key < length)
    key = first + tl.arange(0, BLOCK) + opaque_zero(length, near_end)
    if KEYS:
        store_rows(D_K_FAR + pair * length * HEAD_DIM, HEAD_DIM, key, length, d_k, HEAD_DIM)
    if VALUES:
        store_rows(D_V_FAR + pair * length * HEAD_DIM, HEAD_DIM, key, length, d_v, HEAD_DIM)


@triton.jit
def end_gradient_kernel(
    X, SUMS, OUT, batches, heads, length, splits, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Compute the gradient of a table's two ends from far tiles: summed dS times vectors.

    Args:
        X: ``HeadTensor`` of ``[batch, heads, length, HEAD_DIM]``, queries or keys.
        SUMS: float32 ``[batch, heads, 2, length]``.
        OUT: float32 ``[heads, 2, splits, HEAD_DIM]``, to be summed over splits.
        splits: programs that share a head's tiles.
        batches: rows of the batch.
        heads: number of heads.
        length: positions in a row.
        BLOCK: tile size.
        HEAD_DIM: features per head.
    """
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    tiles = tl.cdiv(length, BLOCK)
    first_row = tl.zeros([HEAD_DIM], tl.float32)
    last_row = tl.zeros([HEAD_DIM], tl.float32)
    for step in range(split, batches * tiles, splits):
        batch = (step // tiles).to(tl.int64)
        first = (step % tiles) * BLOCK
        pointer = head_pointer(X, batch, head)
        x = load_rows(pointer, X.row_stride, first, length, False, BLOCK, HEAD_DIM).to(tl.float32)
        sums = SUMS + (batch * heads + head) * 2 * length
        first_row += tl.sum(load_vector(sums, first, length, False, BLOCK)[:, None] * x, 0)
        last_row += tl.sum(load_vector(sums + length, first, length, False, BLOCK)[:, None] * x, 0)
    out = OUT + (head * 2 * splits + split) * HEAD_DIM + tl.arange(0, HEAD_DIM)
    tl.store(out, first_row)
    tl.store(out + splits * HEAD_DIM, last_row)

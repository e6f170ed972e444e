"""The backward kernels of queries, keys and values, and the band of score gradients they share.

``key_kernel`` recomputes the scores, computes dV and writes the gradient dS of the scores of each
near tile to the band, once; ``far`` computes what far tiles contribute. From the band,
``key_gradient_kernel`` computes dK, ``query_gradient_kernel`` dQ and ``table_gradient_kernel``
(``table_gradients``) the gradients of the tables. Each sum is computed by one program in a fixed
order, so results are deterministic.

The rotation of ``tiles`` is its own inverse: column w of the rotated dS holds the gradient of the
product with row w of block m (w <= row) or of block m - 1. Neighbouring tiles share a block, so
the two halves that belong to it are merged and cost one product.

The band is ``[batch * heads, key tiles, width, BLOCK, BLOCK]``, tiles of keys by queries; query
tile i is stored at i mod width, and width covers all near tiles of a key tile.
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
    band_tile,
    dot,
    far_tiles,
    head_pointer,
    in_high_block,
    load_rows,
    load_vector,
    opaque_zero,
    position_bias,
    program_tile,
    rotate_halves,
    select_terms,
    store_rows,
    table_product,
    tile_terms,
    visible_tiles,
)


@triton.jit
def output_products_kernel(
    OUT, D_OUT, DELTA, heads, length, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Compute the products of the output with its gradient, summed over features.

    Args:
        OUT, D_OUT: ``HeadTensor`` of ``[batch, heads, length, HEAD_DIM]``.
        DELTA: float32 ``[batch, heads, length]``.
        heads: number of heads.
        length: positions in a row.
        BLOCK: tile size.
        HEAD_DIM: features per head.
    """
    tile, pair, batch, head = program_tile(length, heads, BLOCK)
    first = tile * BLOCK
    pointer = head_pointer(OUT, batch, head)
    out = load_rows(pointer, OUT.row_stride, first, length, False, BLOCK, HEAD_DIM)
    pointer = head_pointer(D_OUT, batch, head)
    d_out = load_rows(pointer, D_OUT.row_stride, first, length, False, BLOCK, HEAD_DIM)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    query = first + tl.arange(0, BLOCK)
    tl.store(DELTA + pair * length + query, delta, mask=query < length)


@triton.jit
def merged_block(
    gradient, rotated, previous, TABLE, row, zero, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Add the gradient through the block of a table that this tile shares with the previous one.

    Args:
        gradient: sum of the tiles before, float32 ``[BLOCK, HEAD_DIM]``.
        rotated: rotated dS of this tile ``[BLOCK, BLOCK]``, read where w <= row; 0.0: no tile.
        previous: rotated dS of the previous tile ``[BLOCK, BLOCK]``, read elsewhere.
        TABLE: linear table of this head, ``[2 * near * BLOCK, HEAD_DIM]``.
        row: first row of the shared block.
        zero: ``opaque_zero``.
        BLOCK: tile size.
        HEAD_DIM: features per head.

    Returns:
        The sum, float32 ``[BLOCK, HEAD_DIM]``.
    """
    rows = load_rows(TABLE, HEAD_DIM, row, 0, True, BLOCK, HEAD_DIM)
    merged = tl.where(in_high_block(zero, BLOCK), rotated, previous).to(previous.dtype)
    return dot(merged, rows, gradient)


@triton.jit
def key_kernel(
    Q, K, V, D_OUT, KEY_TABLE, QUERY_TABLE, QUERY_BEGIN, QUERY_END, LSE2, DELTA, D_V, BAND, D_V_FAR,
    DROPOUT, heads, length, near, width, log2_scale, unpack_scale,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr,
    HALF: tl.constexpr, FAR: tl.constexpr, RANGES: tl.constexpr, EVEN: tl.constexpr,
    DROP: tl.constexpr, SCORES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute dV of a tile of keys and its band of dS.

    Arguments not listed are those of ``forward.forward_kernel``.

    Args:
        D_OUT, D_V: ``HeadTensor`` of ``[batch, heads, length, HEAD_DIM]``.
        QUERY_BEGIN: int32 ``[batch, length]``, first query that sees each key; only with RANGES.
        QUERY_END: int32 ``[batch, length]``, one past the last; only with RANGES.
        LSE2, DELTA: float32 ``[batch, heads, length]``.
        BAND: as in the module docstring.
        D_V_FAR: float32 ``[batch, heads, length, HEAD_DIM]``, from far queries; only with FAR.
        width: query tiles in a key tile's band.
        SCORES: compute the probabilities; otherwise read them from the band.
        VALUES: compute dV and dS; otherwise leave the probabilities in the band.
    """
    MASKED: tl.constexpr = RANGES or not EVEN
    tile, pair, batch, head = program_tile(length, heads, BLOCK)
    q_pointer = head_pointer(Q, batch, head)
    d_out_pointer = head_pointer(D_OUT, batch, head)
    KEY_TABLE += head * (2 * near * BLOCK) * HEAD_DIM
    QUERY_TABLE += head * (2 * near * BLOCK) * HEAD_DIM
    QUERY_BEGIN += batch * length
    QUERY_END += batch * length
    BAND += (pair * tl.cdiv(length, BLOCK) + tile) * width * (BLOCK * BLOCK)
    dtype = Q.pointer.dtype.element_ty

    offsets = tl.arange(0, BLOCK)
    first = tile * BLOCK
    k = load_rows(
        head_pointer(K, batch, head), K.row_stride, first, length, EVEN, BLOCK, HEAD_DIM
    )  # fmt: skip
    v = load_rows(
        head_pointer(V, batch, head), V.row_stride, first, length, EVEN, BLOCK, HEAD_DIM
    )  # fmt: skip
    state = dropout_state(DROPOUT, batch, head, DROP)
    query_begin, query_end = visible_range(QUERY_BEGIN, QUERY_END, first + offsets, length, RANGES)
    _, _, near_begin, near_end = visible_tiles(
        QUERY_BEGIN, QUERY_END, tile, length, near, RANGES, BLOCK
    )
    d_v = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    if FAR:
        far_pointer = D_V_FAR + pair * length * HEAD_DIM
        d_v = load_rows(far_pointer, HEAD_DIM, first, length, False, BLOCK, HEAD_DIM)

    # Kept from step to step in the precision in which they are rotated: half the registers.
    k_high = tl.zeros([BLOCK, BLOCK], tl.float16 if HALF else tl.float32)
    if P2C:
        row = tl.maximum(near - near_begin + tile, 0) * BLOCK  # not read if there is no near tile
        k_high = table_product(k, QUERY_TABLE, row, BLOCK, HEAD_DIM).to(k_high.dtype)
    for query_tile in range(near_begin, near_end):
        first_query = query_tile * BLOCK
        q = load_rows(q_pointer, Q.row_stride, first_query, length, EVEN, BLOCK, HEAD_DIM)
        d_out = load_rows(
            d_out_pointer, D_OUT.row_stride, first_query, length, EVEN, BLOCK, HEAD_DIM
        )
        zero = opaque_zero(length, query_tile)
        if SCORES:
            row = (query_tile - tile + near) * BLOCK
            q_terms = k_high
            k_terms = k_high
            if C2P:
                q_terms = tile_terms(q, KEY_TABLE, row, zero, HALF, BLOCK, HEAD_DIM)
            if P2C:
                k_row = 2 * near * BLOCK - row - BLOCK
                k_low = table_product(k, QUERY_TABLE, k_row, BLOCK, HEAD_DIM).to(k_high.dtype)
                k_terms = select_terms(k_high, k_low, zero, HALF, BLOCK)
                k_high = k_low
            bias = position_bias(k_terms, q_terms, zero, unpack_scale, P2C, C2P, HALF, BLOCK)
            # Loaded where it is used: earlier, it would take registers from the products above.
            lse2 = load_vector(LSE2 + pair * length, first_query + zero, length, EVEN, BLOCK)
            scores = dot(k, tl.trans(q), bias)
            visible = offsets[None, :] >= (query_begin - first_query)[:, None]
            visible = visible & (offsets[None, :] < (query_end - first_query)[:, None])
            signed = signed_probabilities(
                scores, lse2, visible, state, tile_pairs(first_query, BLOCK), first, log2_scale,
                DROPOUT,
                True, MASKED, DROP, BLOCK,
            )  # fmt: skip
        else:
            signed = tl.load(band_tile(BAND, query_tile % width, BLOCK)).to(tl.float32)
        stored = signed
        if VALUES:
            d_v = dot(tl.maximum(signed, 0.0).to(dtype), d_out, d_v)
            delta = load_vector(DELTA + pair * length, first_query + zero, length, EVEN, BLOCK)
            products = dot(v, tl.trans(d_out))
            stored = score_gradient(signed, products, delta[None, :], DROPOUT.keep_scale, DROP)
        tl.store(band_tile(BAND, query_tile % width, BLOCK), stored.to(dtype))

    if VALUES:
        zero = opaque_zero(length, near_end)
        d_v_pointer = head_pointer(D_V, batch + zero, head + zero)
        d_v *= DROPOUT.keep_scale
        store_rows(d_v_pointer, D_V.row_stride, first + offsets + zero, length, d_v, HEAD_DIM)


@triton.jit
def key_gradient_kernel(
    Q, QUERY_TABLE, QUERY_BEGIN, QUERY_END, BAND, D_K_FAR, D_K, heads, length, near, width, scale,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, P2C: tl.constexpr, FAR: tl.constexpr,
    RANGES: tl.constexpr, EVEN: tl.constexpr, CONTENT: tl.constexpr,
):  # fmt: skip
    """Compute dK of a tile of keys from the band and from ``far.far_key_kernel``.

    Arguments not listed are those of ``key_kernel``.

    Args:
        D_K_FAR: float32 ``[batch, heads, length, HEAD_DIM]``, from far queries; only with FAR.
        D_K: ``HeadTensor`` of ``[batch, heads, length, HEAD_DIM]``.
        scale: scale of the scores.
        CONTENT: whether to include the gradient of q . k; otherwise only the table's.
    """
    tile, pair, batch, head = program_tile(length, heads, BLOCK)
    q_pointer = head_pointer(Q, batch, head)
    QUERY_TABLE += head * (2 * near * BLOCK) * HEAD_DIM
    BAND += (pair * tl.cdiv(length, BLOCK) + tile) * width * (BLOCK * BLOCK)
    dtype = Q.pointer.dtype.element_ty
    _, _, near_begin, near_end = visible_tiles(
        QUERY_BEGIN + batch * length, QUERY_END + batch * length, tile, length, near, RANGES, BLOCK
    )
    d_k = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    if FAR:
        far_pointer = D_K_FAR + pair * length * HEAD_DIM
        d_k = load_rows(far_pointer, HEAD_DIM, tile * BLOCK, length, False, BLOCK, HEAD_DIM)
    previous = tl.zeros([BLOCK, BLOCK], dtype)
    for query_tile in range(near_begin, near_end):
        d_scores = tl.load(band_tile(BAND, query_tile % width, BLOCK))
        if CONTENT:
            first = query_tile * BLOCK
            q = load_rows(q_pointer, Q.row_stride, first, length, EVEN, BLOCK, HEAD_DIM)
            d_k = dot(d_scores, q, d_k)
        if P2C:
            zero = opaque_zero(length, query_tile)
            rotated = rotate_halves(d_scores, zero, BLOCK)
            row = (near - query_tile + tile) * BLOCK
            d_k = merged_block(d_k, rotated, previous, QUERY_TABLE, row, zero, BLOCK, HEAD_DIM)
            previous = rotated
    if P2C:
        # The row of an empty range is held within the table; it contributes nothing.
        row = tl.minimum(near - near_end + tile, 2 * near - 1) * BLOCK
        zero = opaque_zero(length, near_end)
        d_k = merged_block(d_k, 0.0, previous, QUERY_TABLE, row, zero, BLOCK, HEAD_DIM)
    key = tile * BLOCK + tl.arange(0, BLOCK)
    store_rows(head_pointer(D_K, batch, head), D_K.row_stride, key, length, d_k * scale, HEAD_DIM)


@triton.jit
def query_gradient_kernel(
    Q, K, V, D_OUT, KEY_TABLE, Q_ENDS, K_ENDS, KEY_BEGIN, KEY_END, LSE2, DELTA, BAND, D_Q, Q_SUMS,
    DROPOUT, heads, length, near, width, scale, log2_scale,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr,
    FAR: tl.constexpr, RANGES: tl.constexpr, EVEN: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """Compute dQ of a tile of queries: near tiles from the band, far ones recomputed.

    Far tiles are computed both here and in ``far.far_key_kernel``, which keeps the order of all
    sums fixed. Arguments not listed are those of ``key_kernel`` and ``forward.forward_kernel``.

    Args:
        D_Q: ``HeadTensor`` of ``[batch, heads, length, HEAD_DIM]``.
        Q_SUMS: float32 ``[batch, heads, 2, length]``, dS summed over the far keys that use the
            first and the last row of KEY_TABLE.
        scale: scale of the scores.
    """
    MASKED: tl.constexpr = RANGES or not EVEN
    tile, pair, batch, head = program_tile(length, heads, BLOCK)
    k_pointer = head_pointer(K, batch, head)
    KEY_TABLE += head * (2 * near * BLOCK) * HEAD_DIM
    KEY_BEGIN += batch * length
    KEY_END += batch * length
    BAND += pair * tl.cdiv(length, BLOCK) * width * (BLOCK * BLOCK)
    dtype = K.pointer.dtype.element_ty
    begin, end, near_begin, near_end = visible_tiles(
        KEY_BEGIN, KEY_END, tile, length, near, RANGES, BLOCK
    )
    d_q = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    previous = tl.zeros([BLOCK, BLOCK], dtype)
    for key_tile in range(near_begin, near_end):
        first = key_tile * BLOCK
        k = load_rows(k_pointer, K.row_stride, first, length, EVEN, BLOCK, HEAD_DIM)
        d_scores = tl.trans(tl.load(band_tile(BAND, key_tile * width + tile % width, BLOCK)))
        d_q = dot(d_scores, k, d_q)
        if C2P:
            zero = opaque_zero(length, key_tile)
            rotated = rotate_halves(d_scores, zero, BLOCK)
            row = (tile - key_tile + near) * BLOCK
            d_q = merged_block(d_q, rotated, previous, KEY_TABLE, row, zero, BLOCK, HEAD_DIM)
            previous = rotated
    if C2P:
        row = tl.minimum(tile - near_end + near, 2 * near - 1) * BLOCK
        zero = opaque_zero(length, near_end)
        d_q = merged_block(d_q, 0.0, previous, KEY_TABLE, row, zero, BLOCK, HEAD_DIM)

    if FAR:
        first_query = tile * BLOCK
        query = first_query + tl.arange(0, BLOCK)
        pointer = head_pointer(Q, batch, head)
        q = load_rows(pointer, Q.row_stride, first_query, length, EVEN, BLOCK, HEAD_DIM)
        pointer = head_pointer(D_OUT, batch, head)
        d_out = load_rows(pointer, D_OUT.row_stride, first_query, length, EVEN, BLOCK, HEAD_DIM)
        v_pointer = head_pointer(V, batch, head)
        lse2 = load_vector(LSE2 + pair * length, first_query, length, EVEN, BLOCK)
        delta = load_vector(DELTA + pair * length, first_query, length, EVEN, BLOCK)
        state = dropout_state(DROPOUT, batch, head, DROP)
        query_pairs = tile_pairs(first_query, BLOCK)
        key_begin, key_end = visible_range(KEY_BEGIN, KEY_END, query, length, RANGES)
        for side in tl.static_range(2):
            q_side = (2 * pair + 1 - side) * length
            k_side = (2 * pair + side) * length
            q_end = tl.zeros([BLOCK], tl.float32)
            if C2P:
                q_end = load_vector(Q_ENDS + q_side, first_query, length, EVEN, BLOCK)
            sums = tl.zeros([BLOCK], tl.float32)
            far_begin, far_end = far_tiles(begin, end, near_begin, near_end, side)
            for key_tile in range(far_begin, far_end):
                first = key_tile * BLOCK
                k = load_rows(k_pointer, K.row_stride, first, length, EVEN, BLOCK, HEAD_DIM)
                v = load_rows(v_pointer, V.row_stride, first, length, EVEN, BLOCK, HEAD_DIM)
                scores = dot(q, tl.trans(k)) + q_end[:, None]
                if P2C:
                    scores += load_vector(K_ENDS + k_side, first, length, EVEN, BLOCK)[None, :]
                products = dot(d_out, tl.trans(v))
                key = first + tl.arange(0, BLOCK)
                visible = (key[None, :] >= key_begin[:, None]) & (key[None, :] < key_end[:, None])
                signed = signed_probabilities(
                    scores, lse2, visible, state, query_pairs, first, log2_scale, DROPOUT,
                    False, MASKED, DROP, BLOCK,
                )  # fmt: skip
                d_scores = score_gradient(
                    signed, products, delta[:, None], DROPOUT.keep_scale, DROP
                )
                d_q = dot(d_scores.to(dtype), k, d_q)
                sums += tl.sum(d_scores, 1)
            if C2P:
                end_row = KEY_TABLE + (1 - side) * (2 * near * BLOCK - 1) * HEAD_DIM
                end_row = tl.load(end_row + tl.arange(0, HEAD_DIM)).to(tl.float32)
                d_q += sums[:, None] * end_row[None, :]
                tl.store(Q_SUMS + q_side + query, sums, mask=query < length)
    zero = opaque_zero(length, near_end)
    query = tile * BLOCK + tl.arange(0, BLOCK) + zero
    d_q_pointer = head_pointer(D_Q, batch + zero, head + zero)
    store_rows(d_q_pointer, D_Q.row_stride, query, length, d_q * scale, HEAD_DIM)

"""The kernels of consecutive queries: query i stands at position i.

Forward: one program per tile of queries, looping over the keys that it attends to. All distances
of a *far* tile lie beyond the position tables and share one slot, that of a table's first or last
row. Its scores are q . k plus one number per query and one per key, and the tables' gradients are
sums of dS over queries or keys, times vectors.

Backward: ``key_kernel`` recomputes the scores, computes dV and writes the gradient dS of the scores
of each near tile to the band, once; ``far_key_kernel`` computes what far tiles contribute. From the
band, ``key_gradient_kernel`` computes dK, ``query_gradient_kernel`` dQ and
``tables.table_gradient_kernel`` the gradients of the tables. Each sum is computed by one program in
a fixed order, so results are deterministic.

The rotation of ``tiles`` is its own inverse: column w of the rotated dS holds the gradient of the
product with row w of block m (w <= row) or of block m - 1. Neighbouring tiles share a block, so
the two halves that belong to it are merged and cost one product.

The band is ``[batch * heads, key tiles, width, BLOCK, BLOCK]``, tiles of keys by queries; query
tile i is stored at i mod width, and width covers all near tiles of a key tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_deberta.ops.triton.tiles import (
    band_tile,
    dot,
    dropout_state,
    far_tiles,
    head_pointer,
    in_high_block,
    load_rows,
    load_vector,
    opaque_zero,
    position_bias,
    program_tile,
    rotate_halves,
    score_gradient,
    select_terms,
    signed_probabilities,
    softmax_result,
    softmax_step,
    store_rows,
    table_product,
    tile_pairs,
    tile_terms,
    visible_range,
    visible_tiles,
)


@triton.jit
def forward_kernel(
    Q, K, V, KEY_TABLE, QUERY_TABLE, Q_ENDS, K_ENDS, KEY_BEGIN, KEY_END, OUT, LSE2, DROPOUT,
    heads, length, near, log2_scale, unpack_scale,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr,
    HALF: tl.constexpr, FAR: tl.constexpr, RANGES: tl.constexpr, EVEN: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    """Compute the output and the log2-sum-exp2 of a tile of queries.

    Args:
        Q, K, V, OUT: ``HeadTensor`` of ``[batch, heads, length, HEAD_DIM]``.
        KEY_TABLE: ``[heads, 2 * near * BLOCK, HEAD_DIM]``, a row per distance, over unpack_scale.
        QUERY_TABLE: the same for negated distances.
        Q_ENDS: float32 ``[batch, heads, 2, length]``, Q times first and last row of KEY_TABLE.
        K_ENDS: float32, K times the ends of QUERY_TABLE. Both are read only with FAR.
        KEY_BEGIN: int32 ``[batch, length]``, first visible key of each query; only with RANGES.
        KEY_END: int32 ``[batch, length]``, one past the last; only with RANGES.
        LSE2: float32 ``[batch, heads, length]``, log2 of the sum of 2**(score / ln 2).
        DROPOUT: ``DropoutArguments``.
        near: tiles fewer than this apart use the tables.
        log2_scale: scale of the scores / ln 2.
        unpack_scale: factor on products with the tables; read only with HALF.
        C2P, P2C: which position terms there are.
        HALF: products with the tables fit float16.
        FAR: whether some tiles lie beyond the tables.
        RANGES: whether visibility is limited.
        EVEN: length is a multiple of BLOCK.
        DROP: whether there is dropout.
        heads: number of heads.
        length: positions in a row.
        BLOCK: tile size.
        HEAD_DIM: features per head.
    """
    MASKED: tl.constexpr = RANGES or not EVEN
    tile, pair, batch, head = program_tile(length, heads, BLOCK)
    k_pointer = head_pointer(K, batch, head)
    v_pointer = head_pointer(V, batch, head)
    KEY_TABLE += head * (2 * near * BLOCK) * HEAD_DIM
    QUERY_TABLE += head * (2 * near * BLOCK) * HEAD_DIM
    KEY_BEGIN += batch * length
    KEY_END += batch * length
    ends = pair * 2 * length

    query = tile * BLOCK + tl.arange(0, BLOCK)
    q_pointer = head_pointer(Q, batch, head)
    q = load_rows(q_pointer, Q.row_stride, tile * BLOCK, length, EVEN, BLOCK, HEAD_DIM)
    key_begin, key_end = visible_range(KEY_BEGIN, KEY_END, query, length, RANGES)
    state = dropout_state(DROPOUT, batch, head, DROP)
    query_pairs = tile_pairs(tile * BLOCK, BLOCK)
    begin, end, near_begin, near_end = visible_tiles(
        KEY_BEGIN, KEY_END, tile, length, near, RANGES, BLOCK
    )
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    accumulator = tl.zeros([BLOCK, HEAD_DIM], tl.float32)

    if FAR:
        for side in tl.static_range(2):
            q_end = tl.zeros([BLOCK], tl.float32)
            if C2P:
                pointer = Q_ENDS + ends + (1 - side) * length
                q_end = load_vector(pointer, tile * BLOCK, length, EVEN, BLOCK)
            far_begin, far_end = far_tiles(begin, end, near_begin, near_end, side)
            for key_tile in range(far_begin, far_end):
                first = key_tile * BLOCK
                k = load_rows(k_pointer, K.row_stride, first, length, EVEN, BLOCK, HEAD_DIM)
                v = load_rows(v_pointer, V.row_stride, first, length, EVEN, BLOCK, HEAD_DIM)
                scores = dot(q, tl.trans(k)) + q_end[:, None]
                if P2C:
                    pointer = K_ENDS + ends + side * length
                    scores += load_vector(pointer, first, length, EVEN, BLOCK)[None, :]
                row_max, row_sum, accumulator = softmax_step(
                    scores, v, row_max, row_sum, accumulator, first, key_begin, key_end, state,
                    query_pairs, log2_scale, DROPOUT, MASKED, DROP, BLOCK,
                )  # fmt: skip

    # Each step needs one new block of the tables; the other one's products are kept from the last
    # step in the precision in which they are rotated, which halves their registers.
    row = tl.maximum(tile - near_begin + near, 0) * BLOCK  # not read if there is no near tile
    q_high = tl.zeros([BLOCK, BLOCK], tl.float16 if HALF else tl.float32)
    if C2P:
        q_high = table_product(q, KEY_TABLE, row, BLOCK, HEAD_DIM).to(q_high.dtype)
    for key_tile in range(near_begin, near_end):
        first = key_tile * BLOCK
        k = load_rows(k_pointer, K.row_stride, first, length, EVEN, BLOCK, HEAD_DIM)
        v = load_rows(v_pointer, V.row_stride, first, length, EVEN, BLOCK, HEAD_DIM)
        row = (tile - key_tile + near) * BLOCK
        zero = opaque_zero(length, key_tile)
        q_terms = q_high
        k_terms = q_high
        if C2P:
            q_low = table_product(q, KEY_TABLE, row - BLOCK, BLOCK, HEAD_DIM).to(q_high.dtype)
            q_terms = select_terms(q_high, q_low, zero, HALF, BLOCK)
            q_high = q_low
        if P2C:
            k_row = 2 * near * BLOCK - row
            k_terms = tile_terms(k, QUERY_TABLE, k_row, zero, HALF, BLOCK, HEAD_DIM)
        # As the product's initial value the bias takes the product's layout, in which each row
        # belongs to one warp; otherwise the row maximum would cross warps.
        bias = position_bias(q_terms, k_terms, zero, unpack_scale, C2P, P2C, HALF, BLOCK)
        row_max, row_sum, accumulator = softmax_step(
            dot(q, tl.trans(k), bias), v, row_max, row_sum, accumulator, first, key_begin, key_end,
            state, query_pairs, log2_scale, DROPOUT, MASKED, DROP, BLOCK,
        )  # fmt: skip

    factor, lse2 = softmax_result(row_max, row_sum, DROPOUT.keep_scale)
    zero = opaque_zero(length, near_end)  # kept across the loops, indices would take registers
    query = tile * BLOCK + tl.arange(0, BLOCK) + zero
    out_pointer = head_pointer(OUT, batch + zero, head + zero)
    store_rows(out_pointer, OUT.row_stride, query, length, accumulator * factor[:, None], HEAD_DIM)
    tl.store(LSE2 + pair * length + query, lse2, mask=query < length)


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
    # Each step loads the tile of the next one, as in ``tables.table_gradient_kernel``.
    column = tile % width
    following = tl.zeros([BLOCK, BLOCK], dtype)
    if near_begin < near_end:
        following = tl.load(band_tile(BAND, near_begin * width + column, BLOCK))
    for key_tile in range(near_begin, near_end):
        first = key_tile * BLOCK
        k = load_rows(k_pointer, K.row_stride, first, length, EVEN, BLOCK, HEAD_DIM)
        d_scores = tl.trans(following)
        upcoming = tl.minimum(key_tile + 1, near_end - 1)
        following = tl.load(band_tile(BAND, upcoming * width + column, BLOCK))
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

    Arguments not listed are those of ``key_kernel`` and ``forward_kernel``.

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

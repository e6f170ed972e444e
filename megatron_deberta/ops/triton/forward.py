"""The forward kernel: one program per tile of queries, looping over the keys that it attends to.

Tiles whose distances all lie beyond the position table need no products with it. All their
distances share a slot, so the score is q . k plus one number per query and one per key (``far``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_deberta.ops.triton.scores import (
    dropout_state,
    softmax_result,
    softmax_step,
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
    position_bias,
    program_tile,
    select_terms,
    store_rows,
    table_product,
    tile_terms,
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

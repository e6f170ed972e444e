"""The kernels of gathered queries, which stand at arbitrary positions (the mask decoder's queries).

A query at p and a key at j use row t = p - j + reach of the linear tables, with t clamped to the
table. The rows that a tile needs lie in a few neighbouring blocks, few if positions rise; the
kernels multiply by one block after the other and gather the terms that lie in it. Positions may
repeat and stand in any order.

Gradients are stored in two forms, neither of size queries x keys. dS by query and table row goes
to ``[queries, rows]`` sums, from which matrix products give the gradient of the content-to-position
table and its part of dQ. dS by key and *position* goes to the band of ``consecutive``: a product
with the one-hot matrix of the queries' positions turns a tile of queries into one of positions.

No buffer is of size queries x keys. Queries are best given in rising order of position, as the mask
decoder does: a tile of them then needs few blocks of the tables. Any order, and repeated positions,
give the same results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_deberta.ops.triton import consecutive
from megatron_deberta.ops.triton.launch import (
    LOG2_E,
    Gradients,
    KernelCall,
    LaunchPlan,
    table_gradients,
)
from megatron_deberta.ops.triton.tiles import (
    band_tile,
    dot,
    dropout_state,
    gathered_tensor,
    head_pointer,
    head_tensor,
    load_rows,
    opaque_zero,
    pairs,
    program_tile,
    score_gradient,
    signed_probabilities,
    softmax_result,
    softmax_step,
    store_rows,
    table_product,
)


@triton.jit
def gathered_positions(
    POSITIONS, KEY_BEGIN, KEY_END, batch, first, queries, BLOCK: tl.constexpr
):  # fmt: skip
    """Load the positions of a tile of queries and the ranges of keys that they see.

    Args:
        POSITIONS, KEY_BEGIN, KEY_END: int32 ``[batch, queries]``.
        batch: row of the batch.
        first: first query of the tile.
        queries: gathered queries per row.
        BLOCK: tile size.

    Returns:
        Position (-1: padding), first visible key and one past the last, int32 ``[BLOCK]`` each.
    """
    query = first + tl.arange(0, BLOCK)
    inside = query < queries
    offsets = batch * queries + query
    position = tl.load(POSITIONS + offsets, mask=inside, other=-1)
    key_begin = tl.load(KEY_BEGIN + offsets, mask=inside, other=0)
    key_end = tl.load(KEY_END + offsets, mask=inside, other=0)
    return position, key_begin, key_end


@triton.jit
def key_tiles(key_begin, key_end, BLOCK: tl.constexpr):
    """Return the first tile of keys that some query sees and one past the last.

    Args:
        key_begin: first visible key of each query, int32 ``[BLOCK]``.
        key_end: one past the last, int32 ``[BLOCK]``.
        BLOCK: tile size.
    """
    end = tl.max(key_end, 0)
    begin = tl.min(tl.where(key_begin < key_end, key_begin, end), 0)
    return begin // BLOCK, tl.cdiv(end, BLOCK)


@triton.jit
def position_range(position):
    """Return the least and the greatest position of a tile's queries, without padding."""
    last = tl.max(position, 0)
    return tl.min(tl.where(position < 0, last, position), 0), last


@triton.jit
def table_row(position, key, near, BLOCK: tl.constexpr):
    """Return the row of the linear tables for each query and key, not clamped to the tables.

    Args:
        position: of the queries, int32 ``[BLOCK]``.
        key: positions of the keys, int32 ``[BLOCK]``.
        near: half the blocks of the tables.
        BLOCK: tile size.

    Returns:
        int32 ``[BLOCK, BLOCK]``, queries by keys.
    """
    return position[:, None] - key[None, :] + near * BLOCK


@triton.jit
def gathered_bias(
    q, k, position, key_tile, KEY_TABLE, QUERY_TABLE, near,
    C2P: tl.constexpr, P2C: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Return the position terms of a tile of queries and keys, float32 ``[BLOCK, BLOCK]``.

    Args:
        q: queries ``[BLOCK, HEAD_DIM]``.
        k: keys ``[BLOCK, HEAD_DIM]``.
        position: of the queries, int32 ``[BLOCK]``, -1 for padding.
        key_tile: index of the tile of keys.
        KEY_TABLE: of this head, ``[2 * near * BLOCK, HEAD_DIM]``, one row per distance.
        QUERY_TABLE: the same, for the distances of the position-to-content term.
        near: half the blocks of the tables.
        C2P: whether there is the content-to-position term.
        P2C: whether there is the position-to-content term.
        BLOCK: tile size.
        HEAD_DIM: features per head.
    """
    limit = 2 * near - 1
    key = key_tile * BLOCK + tl.arange(0, BLOCK)
    row = table_row(position, key, near, BLOCK)
    row = tl.minimum(tl.maximum(row, 0), 2 * near * BLOCK - 1)
    nearest, farthest = position_range(position)
    first = nearest - key_tile * BLOCK - BLOCK + 1 + near * BLOCK
    last = farthest - key_tile * BLOCK + near * BLOCK
    first = tl.minimum(tl.maximum(first, 0) // BLOCK, limit)
    last = tl.minimum(tl.maximum(last, 0) // BLOCK, limit)
    last = tl.where(farthest < 0, first - 1, last)

    bias = tl.zeros([BLOCK, BLOCK], tl.float32)
    column = row & (BLOCK - 1)
    for block in range(first, last + 1):
        term = tl.zeros([BLOCK, BLOCK], tl.float32)
        if C2P:
            product = table_product(q, KEY_TABLE, block * BLOCK, BLOCK, HEAD_DIM)
            term += tl.gather(product, column, 1)
        if P2C:
            product = table_product(k, QUERY_TABLE, block * BLOCK, BLOCK, HEAD_DIM)
            term += tl.trans(tl.gather(product, tl.trans(column), 1))
        bias += tl.where(row // BLOCK == block, term, 0.0)
    return bias


@triton.jit
def gathered_forward_kernel(
    Q, K, V, KEY_TABLE, QUERY_TABLE, POSITIONS, KEY_BEGIN, KEY_END, OUT, LSE2, DROPOUT,
    heads, queries, length, near, log2_scale,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    """Compute the output and the log2-sum-exp2 of a tile of gathered queries.

    Arguments not listed are those of ``forward.forward_kernel``, with ``[.., queries, ..]`` for
    Q, OUT and LSE2.

    Args:
        KEY_TABLE, QUERY_TABLE: neither scaled nor, for QUERY_TABLE, negated.
        POSITIONS: int32 ``[batch, queries]``, -1 for padding.
        KEY_BEGIN: int32 ``[batch, queries]``, first visible key.
        KEY_END: int32 ``[batch, queries]``, one past the last; 0 for padding.
        queries: gathered queries per row.
        length: keys per row.
    """
    tile, pair, batch, head = program_tile(queries, heads, BLOCK)
    k_pointer = head_pointer(K, batch, head)
    v_pointer = head_pointer(V, batch, head)
    KEY_TABLE += head * (2 * near * BLOCK) * HEAD_DIM
    QUERY_TABLE += head * (2 * near * BLOCK) * HEAD_DIM
    first_query = tile * BLOCK
    q_pointer = head_pointer(Q, batch, head)
    q = load_rows(q_pointer, Q.row_stride, first_query, queries, False, BLOCK, HEAD_DIM)
    position, key_begin, key_end = gathered_positions(
        POSITIONS, KEY_BEGIN, KEY_END, batch, first_query, queries, BLOCK
    )
    state = dropout_state(DROPOUT, batch, head, DROP)

    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    accumulator = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    begin, end = key_tiles(key_begin, key_end, BLOCK)
    for key_tile in range(begin, end):
        first = key_tile * BLOCK
        k = load_rows(k_pointer, K.row_stride, first, length, False, BLOCK, HEAD_DIM)
        v = load_rows(v_pointer, V.row_stride, first, length, False, BLOCK, HEAD_DIM)
        bias = gathered_bias(
            q, k, position, key_tile, KEY_TABLE, QUERY_TABLE, near, C2P, P2C, BLOCK, HEAD_DIM
        )
        row_max, row_sum, accumulator = softmax_step(
            dot(q, tl.trans(k), bias), v, row_max, row_sum, accumulator, first, key_begin, key_end,
            state, pairs(position), log2_scale, DROPOUT, True, DROP, BLOCK,
        )  # fmt: skip
    factor, lse2 = softmax_result(row_max, row_sum, DROPOUT.keep_scale)
    query = first_query + tl.arange(0, BLOCK)
    out_pointer = head_pointer(OUT, batch, head)
    store_rows(out_pointer, OUT.row_stride, query, queries, accumulator * factor[:, None], HEAD_DIM)
    tl.store(LSE2 + pair * queries + query, lse2, mask=query < queries)


@triton.jit
def gathered_query_kernel(
    Q, K, V, D_OUT, KEY_TABLE, QUERY_TABLE, POSITIONS, KEY_BEGIN, KEY_END, LSE2, DELTA, D_Q, BY_ROW,
    DROPOUT, heads, queries, length, near, log2_scale,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    """Compute dQ of gathered queries through the keys, and dS by row of KEY_TABLE.

    Arguments not listed are those of ``gathered_forward_kernel`` and ``backward.key_kernel``.

    Args:
        D_Q: float32 ``[batch, heads, queries, HEAD_DIM]``, before the scale, without the part
            that comes through KEY_TABLE.
        BY_ROW: float32 ``[batch, heads, queries, 2 * near * BLOCK]``, zero at first; all far keys
            are added up in the rows at the ends.
    """
    tile, pair, batch, head = program_tile(queries, heads, BLOCK)
    k_pointer = head_pointer(K, batch, head)
    v_pointer = head_pointer(V, batch, head)
    table_rows = 2 * near * BLOCK
    KEY_TABLE += head * table_rows * HEAD_DIM
    QUERY_TABLE += head * table_rows * HEAD_DIM
    first_query = tile * BLOCK
    row = pair * queries
    pointer = head_pointer(Q, batch, head)
    q = load_rows(pointer, Q.row_stride, first_query, queries, False, BLOCK, HEAD_DIM)
    pointer = head_pointer(D_OUT, batch, head)
    d_out = load_rows(pointer, D_OUT.row_stride, first_query, queries, False, BLOCK, HEAD_DIM)
    position, key_begin, key_end = gathered_positions(
        POSITIONS, KEY_BEGIN, KEY_END, batch, first_query, queries, BLOCK
    )
    query = first_query + tl.arange(0, BLOCK)
    lse2 = tl.load(LSE2 + row + query, mask=query < queries, other=0.0)
    state = dropout_state(DROPOUT, batch, head, DROP)
    by_row = BY_ROW + (row + first_query) * table_rows
    row_offset = tl.arange(0, BLOCK)[:, None] * table_rows

    d_q = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    after = tl.zeros([BLOCK], tl.float32)
    before = tl.zeros([BLOCK], tl.float32)
    begin, end = key_tiles(key_begin, key_end, BLOCK)
    for key_tile in range(begin, end):
        first = key_tile * BLOCK
        key = first + tl.arange(0, BLOCK)
        k = load_rows(k_pointer, K.row_stride, first, length, False, BLOCK, HEAD_DIM)
        v = load_rows(v_pointer, V.row_stride, first, length, False, BLOCK, HEAD_DIM)
        bias = gathered_bias(
            q, k, position, key_tile, KEY_TABLE, QUERY_TABLE, near, C2P, P2C, BLOCK, HEAD_DIM
        )
        scores = dot(q, tl.trans(k), bias)
        products = dot(d_out, tl.trans(v))
        visible = (key[None, :] >= key_begin[:, None]) & (key[None, :] < key_end[:, None])
        zero = opaque_zero(length, key_tile)
        signed = signed_probabilities(
            scores, lse2, visible, state, pairs(position | zero), first, log2_scale, DROPOUT,
            False, True, DROP, BLOCK,
        )  # fmt: skip
        # Loaded where it is used: earlier, it would take registers from the products above. So
        # would the queries' hashes, if they were computed once.
        at = query + zero
        delta = tl.load(DELTA + row + at, mask=at < queries, other=0.0)
        d_scores = score_gradient(signed, products, delta[:, None], DROPOUT.keep_scale, DROP)
        d_q = dot(d_scores.to(k.dtype), k, d_q)
        if C2P:
            # Rows inside the table stand for one distance, so each is written at most once.
            t = table_row(position, key, near, BLOCK)
            inside = visible & (t > 0) & (t < table_rows - 1)
            clamped = tl.minimum(tl.maximum(t, 0), table_rows - 1)
            tl.store(by_row + (row_offset + clamped), d_scores, mask=inside)
            after += tl.sum(tl.where(t >= table_rows - 1, d_scores, 0.0), 1)
            before += tl.sum(tl.where(t <= 0, d_scores, 0.0), 1)
    # Computed again: kept across the loop, the indices would take registers.
    tile, pair, batch, head = program_tile(queries + opaque_zero(length, end), heads, BLOCK)
    query = tile * BLOCK + tl.arange(0, BLOCK)
    row = pair * queries
    if C2P:
        ends = BY_ROW + (row + query) * table_rows
        tl.store(ends, before, mask=query < queries)
        tl.store(ends + table_rows - 1, after, mask=query < queries)
    store_rows(D_Q + row * HEAD_DIM, HEAD_DIM, query, queries, d_q, HEAD_DIM)


@triton.jit
def gathered_key_kernel(
    Q, K, V, D_OUT, KEY_TABLE, QUERY_TABLE, POSITIONS, KEY_BEGIN, KEY_END, LSE2, DELTA, D_V, D_K,
    BAND, K_SUMS, DROPOUT, heads, queries, length, near, width, log2_scale,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    """Compute dV and dK of a tile of keys from gathered queries, and the band by position.

    Arguments not listed are those of ``gathered_query_kernel`` and ``backward.key_kernel``.

    Args:
        D_K: float32 ``[batch, heads, length, HEAD_DIM]``, before the scale, without the part that
            comes from the band.
        BAND: as in ``backward``, by position instead of query; zero at first.
        K_SUMS: float32 ``[batch, heads, 2, length]``, dS summed over queries beyond the band.
    """
    tile, pair, batch, head = program_tile(length, heads, BLOCK)
    q_pointer = head_pointer(Q, batch, head)
    d_out_pointer = head_pointer(D_OUT, batch, head)
    KEY_TABLE += head * (2 * near * BLOCK) * HEAD_DIM
    QUERY_TABLE += head * (2 * near * BLOCK) * HEAD_DIM
    BAND += (pair * tl.cdiv(length, BLOCK) + tile) * width * (BLOCK * BLOCK)
    dtype = Q.pointer.dtype.element_ty
    first = tile * BLOCK
    key = first + tl.arange(0, BLOCK)
    k = load_rows(
        head_pointer(K, batch, head), K.row_stride, first, length, False, BLOCK, HEAD_DIM
    )  # fmt: skip
    v = load_rows(
        head_pointer(V, batch, head), V.row_stride, first, length, False, BLOCK, HEAD_DIM
    )  # fmt: skip

    d_v = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    d_k = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    after = tl.zeros([BLOCK], tl.float32)
    before = tl.zeros([BLOCK], tl.float32)
    state = dropout_state(DROPOUT, batch, head, DROP)
    for query_tile in range(0, tl.cdiv(queries, BLOCK)):
        first_query = query_tile * BLOCK
        q = load_rows(q_pointer, Q.row_stride, first_query, queries, False, BLOCK, HEAD_DIM)
        d_out = load_rows(
            d_out_pointer, D_OUT.row_stride, first_query, queries, False, BLOCK, HEAD_DIM
        )
        position, key_begin, key_end = gathered_positions(
            POSITIONS, KEY_BEGIN, KEY_END, batch, first_query, queries, BLOCK
        )
        query = first_query + tl.arange(0, BLOCK)
        lse2 = tl.load(LSE2 + pair * queries + query, mask=query < queries, other=0.0)
        delta = tl.load(DELTA + pair * queries + query, mask=query < queries, other=0.0)
        bias = gathered_bias(
            q, k, position, tile, KEY_TABLE, QUERY_TABLE, near, C2P, P2C, BLOCK, HEAD_DIM
        )
        scores = dot(k, tl.trans(q), tl.trans(bias))
        visible = (key[:, None] >= key_begin[None, :]) & (key[:, None] < key_end[None, :])
        signed = signed_probabilities(
            scores, lse2, visible, state, pairs(position), first, log2_scale, DROPOUT,
            True, True, DROP, BLOCK,
        )  # fmt: skip
        d_v = dot(tl.maximum(signed, 0.0).to(dtype), d_out, d_v)
        products = dot(v, tl.trans(d_out))
        d_scores = score_gradient(signed, products, delta[None, :], DROPOUT.keep_scale, DROP)
        d_k = dot(d_scores.to(dtype), q, d_k)
        if P2C:
            # As in the other kernels, the distance in tiles decides between band and sums.
            apart = position // BLOCK - tile
            after += tl.sum(tl.where((apart >= near)[None, :], d_scores, 0.0), 1)
            before += tl.sum(tl.where((apart <= -near)[None, :], d_scores, 0.0), 1)
            nearest, farthest = position_range(position)
            position_begin = tl.maximum(nearest // BLOCK, tile - near + 1)
            position_end = tl.minimum(farthest // BLOCK, tile + near - 1) + 1
            for position_tile in range(position_begin, position_end):
                positions = position_tile * BLOCK + tl.arange(0, BLOCK)
                one_hot = (position[:, None] == positions[None, :]).to(dtype)
                by_position = dot(d_scores.to(dtype), one_hot)
                pointers = band_tile(BAND, position_tile % width, BLOCK)
                tl.debug_barrier()  # another warp may have written what this one adds to
                by_position += tl.load(pointers).to(tl.float32)
                tl.store(pointers, by_position.to(dtype))
    if P2C:
        # QUERY_TABLE is not negated here, but the sums are for the negated table.
        sums = K_SUMS + pair * 2 * length + key
        tl.store(sums, after, mask=key < length)
        tl.store(sums + length, before, mask=key < length)
        end_row = QUERY_TABLE + (2 * near * BLOCK - 1) * HEAD_DIM + tl.arange(0, HEAD_DIM)
        d_k += after[:, None] * tl.load(end_row).to(tl.float32)[None, :]
        end_row = QUERY_TABLE + tl.arange(0, HEAD_DIM)
        d_k += before[:, None] * tl.load(end_row).to(tl.float32)[None, :]
    store_rows(D_K + pair * length * HEAD_DIM, HEAD_DIM, key, length, d_k, HEAD_DIM)
    d_v *= DROPOUT.keep_scale
    store_rows(head_pointer(D_V, batch, head), D_V.row_stride, key, length, d_v, HEAD_DIM)


class _GatheredPlan(LaunchPlan):
    """The plan of a call with gathered queries."""

    def __init__(self, call: KernelCall) -> None:
        super().__init__(call)
        assert call.ranges is not None
        self.placement = call.ranges.unbind()
        self.queries = call.q.shape[2]
        self.tables = [self.key_table, self.query_table]
        if call.pos_query is not None:  # these kernels do not negate distances
            slots = self.linear_form(self.p2c_sign).slots
            self.tables[1] = call.pos_query.index_select(1, slots)
        self.query_grid = (-(-self.queries // self.tile) * self.batch * self.heads,)
        self.shape = (self.heads, self.queries, self.length, self.near)


def forward(call: KernelCall) -> tuple[Tensor, Tensor]:
    """Run the forward pass.

    Returns:
        Output like ``q``, and the log2-sum-exp2 of the scores, float32 ``[batch, heads, queries]``.
    """
    plan = _GatheredPlan(call)
    output = torch.empty_like(call.q)
    lse2 = plan.empty(*call.q.shape[:3])
    if plan.queries:
        plan.launch(
            gathered_forward_kernel, *map(gathered_tensor, (call.q, call.k, call.v)), *plan.tables,
            *plan.placement, gathered_tensor(output), lse2, plan.dropout, *plan.shape,
            call.scale * LOG2_E, grid=plan.query_grid,
        )  # fmt: skip
    return output, lse2


def backward(call: KernelCall, output: Tensor, lse2: Tensor, d_output: Tensor) -> Gradients:
    """Run the backward pass; arguments as for ``launch.backward``."""
    plan = _GatheredPlan(call)
    q, k, v = call.q, call.k, call.v
    if not plan.queries:
        d_pos_key, d_pos_query = (
            None if x is None else torch.zeros_like(x) for x in (call.pos_key, call.pos_query)
        )
        d_q, d_k, d_v = map(torch.zeros_like, (q, k, v))
        return d_q, d_k, d_v, d_pos_key, d_pos_query
    delta = plan.empty(*q.shape[:3])
    plan.launch(
        consecutive.output_products_kernel, head_tensor(output), head_tensor(d_output), delta,
        plan.heads, plan.queries, grid=plan.query_grid,
    )  # fmt: skip
    d_q, d_pos_key = _query_side(plan, lse2, delta, d_output)
    d_k, d_v, d_pos_query = _key_side(plan, lse2, delta, d_output)
    return d_q, d_k, d_v, d_pos_key, d_pos_query


def _query_side(
    plan: _GatheredPlan, lse2: Tensor, delta: Tensor, d_output: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of q and pos_key."""
    call, q = plan.call, plan.call.q
    d_q = plan.empty(*q.shape)
    by_row = plan.empty(0)
    if plan.key_form is not None:
        by_row = plan.empty(*q.shape[:3], plan.key_table.shape[1]).zero_()
    plan.launch(
        gathered_query_kernel, *map(gathered_tensor, (q, call.k, call.v, d_output)), *plan.tables,
        *plan.placement, lse2, delta, d_q, by_row, plan.dropout, *plan.shape, call.scale * LOG2_E,
        grid=plan.query_grid,
    )  # fmt: skip
    d_pos_key = None
    if plan.key_form is not None:
        d_q = d_q + torch.matmul(by_row, plan.key_table.float())
        # [heads, rows, batch * queries] x [heads, batch * queries, head_dim]
        by_head = by_row.permute(1, 3, 0, 2).flatten(2)
        d_rows = torch.bmm(by_head, q.permute(1, 0, 2, 3).flatten(1, 2).float())
        lengths = plan.key_form.rows.diff(dim=1)[:, 0].long()
        folded = torch.segment_reduce(
            d_rows.transpose(0, 1).contiguous(), "sum", lengths=lengths, unsafe=True
        )
        d_pos_key = (folded.transpose(0, 1) * call.scale).to(q.dtype).contiguous()
    return torch.empty_like(q).copy_(d_q * call.scale), d_pos_key


def _key_side(
    plan: _GatheredPlan, lse2: Tensor, delta: Tensor, d_output: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the gradients of k, v and pos_query."""
    call, q, k = plan.call, plan.call.q, plan.call.k
    d_v, d_k = torch.empty_like(call.v), torch.empty_like(k)
    d_k_part, k_sums = plan.empty(*k.shape), plan.empty(*k.shape[:2], 2, plan.length)
    band = plan.empty(0, dtype=q.dtype)
    if plan.query_form is not None:
        shape = (plan.batch, plan.heads, plan.tiles, plan.width, plan.tile, plan.tile)
        band = plan.empty(*shape, dtype=q.dtype).zero_()
    plan.launch(
        gathered_key_kernel, *map(gathered_tensor, (q, k, call.v, d_output)), *plan.tables,
        *plan.placement, lse2, delta, gathered_tensor(d_v), d_k_part, band, k_sums, plan.dropout,
        *plan.shape, plan.width, call.scale * LOG2_E,
    )  # fmt: skip
    if plan.query_form is None:
        return d_k.copy_(d_k_part * call.scale), d_v, None
    # The band is by position, as if every position had a query. The kernel does not read Q.
    plan.launch(
        consecutive.key_gradient_kernel, head_tensor(k), plan.query_table, k, k, band, d_k_part,
        head_tensor(d_k), plan.heads, plan.length, plan.near, plan.width, call.scale, CONTENT=False,
        FAR=True,
    )  # fmt: skip
    by_position = LaunchPlan(call._replace(q=k, pos_key=None))
    return d_k, d_v, table_gradients(by_position, band, k_sums, k_sums)[1]

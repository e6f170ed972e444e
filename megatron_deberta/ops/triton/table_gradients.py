"""The kernels that sum the band of score gradients along diagonals, for the position tables.

All tiles of a diagonal (query tile - key tile = m) use the same two blocks of each table. A
program owns one diagonal of one head and keeps the sums of its four blocks in registers while it
walks over the tiles of its batch rows; ``fold_kernel`` then adds up all that belongs to a slot,
in a fixed order: no two programs ever write to one place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_deberta.ops.triton.tiles import (
    hidden_zero,
    in_high_block,
    rotate,
    rows_of,
)


@triton.jit
def turned_tiles(
    d_scores, zero, dtype: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr, B: tl.constexpr
):
    """Rotated dS with keys for rows, and with queries for rows.

    Args:
        d_scores: tile of keys by queries.
        zero: ``hidden_zero``.
        dtype: of the tile.
        C2P: whether the second is wanted.
        P2C: whether the first is.
        B: tile size.
    """
    by_key = d_scores
    by_query = d_scores
    if C2P and P2C and dtype.primitive_bitwidth == 16:
        low = d_scores.to(tl.uint16, bitcast=True).to(tl.uint32)
        word = rotate(low | (tl.trans(low) << 16), zero, B)
        by_key = (word & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        by_query = (word >> 16).to(tl.uint16).to(dtype, bitcast=True)
    else:
        if P2C:
            by_key = rotate(d_scores, zero, B)
        if C2P:
            by_query = rotate(tl.trans(d_scores), zero, B)
    return by_key, by_query


@triton.jit
def table_gradient_kernel(
    Q,
    K,
    BAND,
    LOW,
    HIGH,
    KEY_PARTS,
    QUERY_PARTS,
    q_b, q_h, q_n: tl.constexpr, k_b, k_h, k_n: tl.constexpr,
    batches,
    heads,
    count,
    near,
    width,
    splits,
    B: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    C2P: tl.constexpr,
    P2C: tl.constexpr,
    RANGES: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Sums of one diagonal over a share of the batch rows.

    Args:
        Q: queries, strides ``q_*``.
        K: keys, strides ``k_*``.
        BAND: dS, as ``backward`` lays it out.
        LOW: first key a query sees; read only with ``RANGES``.
        HIGH: one past the last.
        KEY_PARTS: float32 ``[splits, 2, heads, 2 * near, B, D]``: of each diagonal, what belongs
            to its block of greater and of smaller distances.
        QUERY_PARTS: likewise, for the table of negated distances.
        q_b: strides.
        q_h: stride.
        q_n: stride.
        k_b: stride.
        k_h: stride.
        k_n: stride.
        batches: batch rows.
        heads: local heads.
        count: length of a row.
        near: tiles fewer than this apart need the tables.
        width: query tiles of a key tile's band.
        splits: shares of the batch rows.
        B: tile size.
        D: head size.
        CHUNK: features a program sums.
        C2P: whether there is the content-to-position term.
        P2C: whether there is the position-to-content term.
        RANGES: whether queries see only a range of the keys.
        EVEN: the length is a multiple of the tile size.
    """
    tiles = tl.cdiv(count, B)
    # The longest diagonals, in the middle, come first.
    order = tl.program_id(0)
    diagonal = near + (order + 1) // 2 * (1 - 2 * (order % 2))
    offset = diagonal - near
    head = tl.program_id(1) % heads
    chunk = tl.program_id(1) // heads
    split = tl.program_id(2)

    key_begin = tl.maximum(0, -offset)
    length = tl.maximum(tl.minimum(tiles, tiles - offset) - key_begin, 0)
    if offset == -near:  # a block of the table, but no diagonal of the band
        length = 0
    first = split * batches // splits
    last = (split + 1) * batches // splits
    dtype: tl.constexpr = Q.dtype.element_ty

    within = tl.arange(0, B)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    key_high = tl.zeros([B, CHUNK], tl.float32)
    key_low = tl.zeros([B, CHUNK], tl.float32)
    query_high = tl.zeros([B, CHUNK], tl.float32)
    query_low = tl.zeros([B, CHUNK], tl.float32)
    for step in range(0, length * (last - first)):
        batch = (first + step // length).to(tl.int64)
        key_tile = key_begin + step % length
        query_tile = key_tile + offset
        place = ((batch * heads + head) * tiles + key_tile) * width + query_tile % width
        pointers = BAND + place * (B * B) + within[:, None] * B + within[None, :]
        if RANGES:  # what nobody sees was never written
            row = batch * count
            last_query = tl.minimum(query_tile * B + B, count) - 1
            sees_tile = tl.load(LOW + row + query_tile * B) < key_tile * B + B
            sees_tile = sees_tile & (tl.load(HIGH + row + last_query) > key_tile * B)
            written = tl.where(sees_tile, B, 0)
            d_scores = tl.load(pointers, mask=within[:, None] < written, other=0.0)
        else:
            d_scores = tl.load(pointers)
        zero = hidden_zero(count, step)
        high = in_high_block(zero, B)
        by_key, by_query = turned_tiles(d_scores, zero, dtype, C2P, P2C, B)
        if C2P:
            base = Q + batch * q_b + head.to(tl.int64) * q_h + chunk * CHUNK
            q = rows_of(base, q_n, query_tile * B, count, EVEN, B, CHUNK)
            part = tl.trans(tl.where(high, by_query, 0.0).to(dtype))
            key_high = tl.dot(part, q, key_high, input_precision="ieee")
            part = tl.trans(tl.where(high, 0.0, by_query).to(dtype))
            key_low = tl.dot(part, q, key_low, input_precision="ieee")
        if P2C:
            base = K + batch * k_b + head.to(tl.int64) * k_h + chunk * CHUNK
            k = rows_of(base, k_n, key_tile * B, count, EVEN, B, CHUNK)
            part = tl.trans(tl.where(high, by_key, 0.0).to(dtype))
            query_high = tl.dot(part, k, query_high, input_precision="ieee")
            part = tl.trans(tl.where(high, 0.0, by_key).to(dtype))
            query_low = tl.dot(part, k, query_low, input_precision="ieee")

    blocks = 2 * near
    part = heads * blocks * B * D
    place = (split.to(tl.int64) * 2 * heads + head) * blocks * B * D + diagonal * B * D
    place += within[:, None] * D + columns[None, :]
    if C2P:
        tl.store(KEY_PARTS + place, key_high)
        tl.store(KEY_PARTS + place + part, key_low)
    if P2C:
        tl.store(QUERY_PARTS + place, query_high)
        tl.store(QUERY_PARTS + place + part, query_low)


@triton.jit
def fold_kernel(
    PARTS,
    ENDS,
    ROWS,
    OUT,
    heads,
    near,
    splits,
    shares,
    scale,
    NEGATED: tl.constexpr,
    FAR: tl.constexpr,
    CHUNK: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
):
    """Gradient of one slot of a table: the sum of all that its distances gave.

    Args:
        PARTS: of ``table_gradient_kernel``.
        ENDS: of ``far.end_gradient_kernel``; read only with ``FAR``.
        ROWS: int32 ``[slots, 2]``, first and one past the last row of the linear table that is a
            copy of a slot.
        OUT: ``[heads, slots, D]``, contiguous.
        heads: local heads.
        near: half the blocks of the linear table.
        splits: of ``PARTS``.
        shares: of ``ENDS``.
        scale: of the scores.
        NEGATED: the table holds negated distances.
        FAR: whether some tiles lie beyond the table.
        CHUNK: rows added up at once.
        B: tile size.
        D: head size.
    """
    slot = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    begin = tl.load(ROWS + 2 * slot)
    end = tl.load(ROWS + 2 * slot + 1)
    blocks = 2 * near
    part = heads * blocks * B * D
    columns = tl.arange(0, D)[None, :]
    total = tl.zeros([D], tl.float32)
    for first in range(begin, end, CHUNK):
        row = first + tl.arange(0, CHUNK)
        block = row // B
        # A block is the one of greater distances of one diagonal, of smaller ones of the next.
        greater = block
        smaller = block + 1
        if NEGATED:
            greater = blocks - block
            smaller = blocks - block - 1
        inside = row < end
        for split in range(0, splits):
            parts = PARTS + (split * 2 * heads + head) * blocks * B * D
            place = parts + (greater * B + row % B)[:, None] * D + columns
            mask = (inside & (greater < blocks))[:, None]
            total += tl.sum(tl.load(place, mask=mask, other=0.0), 0)
            place = parts + part + (smaller * B + row % B)[:, None] * D + columns
            mask = (inside & (smaller < blocks))[:, None]
            total += tl.sum(tl.load(place, mask=mask, other=0.0), 0)
    if FAR:
        for side in tl.static_range(2):
            row = side * (blocks * B - 1)
            if (begin <= row) & (row < end):
                ends = ENDS + (head * 2 + side) * shares * D
                for share in range(0, shares):
                    total += tl.load(ends + share * D + tl.arange(0, D))
    out = OUT + (head * tl.num_programs(0) + slot) * D + tl.arange(0, D)
    tl.store(out, (total * scale).to(OUT.dtype.element_ty))

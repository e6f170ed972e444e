"""The position tables in linear form, as the fused kernels read them, and their gradients.

Row t of the linear table stands for distance t - near * tile (negated in the keys' table). From
``saturation`` on all distances share a slot, so tiles that lie beyond need no table.

Gradients are sums of the band of score gradients along diagonals. All tiles of a diagonal (query
tile - key tile = m) use the same two blocks of each table. A program computes one diagonal of one
head and keeps the sums of its four blocks in registers while it loops over the tiles of its batch
rows. ``fold_kernel`` then adds up all that belongs to a slot in a fixed order; no two programs
write to the same address.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_deberta.ops.relative_positions import RelativePositions
from megatron_deberta.ops.triton.tiles import (
    band_tile,
    dot,
    head_pointer,
    in_high_block,
    load_rows,
    opaque_zero,
    pack_halves,
    rotate,
    unpack_half,
)


@dataclass(frozen=True, slots=True)
class LinearTable:
    """Mapping between the slots of a position table and the rows of its linear form.

    Attributes:
        slots: int64 ``[2 * near * tile]``, the slot of each row.
        rows: int32 ``[2 * span, 2]``, first and one past the last row of each slot.
    """

    slots: Tensor
    rows: Tensor


@lru_cache(maxsize=64)
def saturation(positions: RelativePositions) -> int:
    """Return the least distance from which on all distances of a sign share a slot."""
    distance = torch.arange(-positions.reach, positions.reach + 1, device="cpu")
    slots = positions.slots(distance)
    inside = (slots != slots[0]) & (slots != slots[-1])
    return int(distance[inside].abs().max()) + 1 if bool(inside.any()) else 1


def near_tiles(positions: RelativePositions, length: int, tile: int) -> int:
    """Return the number of tiles from which on two tiles are too far apart to need the tables.

    At least 1 and at most the tiles of a row.

    Args:
        positions: map from distances to slots.
        length: positions in a row.
        tile: positions per tile.
    """
    beyond = -(-(saturation(positions) + tile - 1) // tile)
    return max(1, min(beyond, -(-length // tile)))


@lru_cache(maxsize=256)
def linear_table(
    positions: RelativePositions, near: int, tile: int, sign: int, device: torch.device
) -> LinearTable:
    """Build the linear form of one table.

    Args:
        positions: map from distances to slots.
        near: ``near_tiles``.
        tile: positions per tile.
        sign: 1 if row t stands for the distance itself, -1 if for its negation.
        device: device of the result.
    """
    with torch.inference_mode(False):
        reach = near * tile
        distance = torch.arange(-reach, reach, device="cpu")
        slots = positions.slots(sign * distance)
        lengths = torch.bincount(slots, minlength=2 * positions.span)
        # Slots are monotonic along the rows, so each occupies one run of them.
        ends = lengths.cumsum(0) if sign > 0 else lengths.flip(0).cumsum(0).flip(0)
        rows = torch.stack([ends - lengths, ends], dim=1).int()
        return LinearTable(slots.to(device), rows.to(device))


@triton.jit
def block_parts(
    d_scores, zero, dtype: tl.constexpr, C2P: tl.constexpr, P2C: tl.constexpr, BLOCK: tl.constexpr
):
    """Return rotated dS, split into the parts of the blocks of greater and of lesser distances.

    Args:
        d_scores: tile of keys by queries.
        zero: ``opaque_zero``.
        dtype: of the tile.
        C2P: whether to return tiles with queries as rows.
        P2C: whether to return tiles with keys as rows.
        BLOCK: tile size.

    Returns:
        Greater and lesser distances with queries as rows, and with keys as rows.
    """
    in_high = in_high_block(zero, BLOCK)
    by_query_high, by_query_low = d_scores, d_scores
    by_key_high, by_key_low = d_scores, d_scores
    if C2P and P2C and dtype.primitive_bitwidth == 16:
        # Both in one word: one rotation and one selection for the two.
        word = rotate(pack_halves(d_scores, tl.trans(d_scores)), zero, BLOCK)
        high = tl.where(in_high, word, 0)
        low = tl.where(in_high, 0, word)
        by_key_high, by_key_low = unpack_half(high, False, dtype), unpack_half(low, False, dtype)
        by_query_high, by_query_low = unpack_half(high, True, dtype), unpack_half(low, True, dtype)
    else:
        if P2C:
            rotated = rotate(d_scores, zero, BLOCK)
            by_key_high = tl.where(in_high, rotated, 0.0).to(dtype)
            by_key_low = tl.where(in_high, 0.0, rotated).to(dtype)
        if C2P:
            rotated = rotate(tl.trans(d_scores), zero, BLOCK)
            by_query_high = tl.where(in_high, rotated, 0.0).to(dtype)
            by_query_low = tl.where(in_high, 0.0, rotated).to(dtype)
    return by_query_high, by_query_low, by_key_high, by_key_low


@triton.jit
def add_blocks(
    high_sum, low_sum, high, low, x, batch, head, first, length, CHUNK: tl.constexpr, chunk,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add one tile to the sums of the blocks of greater and of lesser distances.

    Args:
        high_sum: float32 ``[BLOCK, CHUNK]``.
        low_sum: float32 ``[BLOCK, CHUNK]``.
        high: of ``block_parts``, with the positions of ``x`` as rows.
        low: the same, of lesser distances.
        x: ``HeadTensor`` of queries or keys.
        batch: batch row.
        head: local head, int64.
        first: first position of the tile.
        length: positions in a row.
        CHUNK: features summed.
        chunk: index of these features.
        EVEN: length is a multiple of BLOCK.
        BLOCK: tile size.
    """
    pointer = head_pointer(x, batch, head) + chunk * CHUNK
    rows = load_rows(pointer, x.row_stride, first, length, EVEN, BLOCK, CHUNK)
    return dot(tl.trans(high), rows, high_sum), dot(tl.trans(low), rows, low_sum)


@triton.jit
def diagonal_tile(
    BAND, KEY_BEGIN, KEY_END, batch, key_tile, offset, head, heads, length, width,
    RANGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load dS of a tile of keys and the tile of queries that is ``offset`` tiles further.

    Arguments as in ``table_gradient_kernel``.
    """
    query_tile = key_tile + offset
    batch = batch.to(tl.int64)
    index = (
        (batch * heads + head) * tl.cdiv(length, BLOCK) + key_tile
    ) * width + query_tile % width
    pointers = band_tile(BAND, index, BLOCK)
    if not RANGES:
        return tl.load(pointers)
    # Tiles without a visible element were never written.
    row = batch * length
    last_query = tl.minimum(query_tile * BLOCK + BLOCK, length) - 1
    written = tl.load(KEY_BEGIN + row + query_tile * BLOCK) < key_tile * BLOCK + BLOCK
    written = written & (tl.load(KEY_END + row + last_query) > key_tile * BLOCK)
    rows = tl.where(written, BLOCK, 0)
    return tl.load(pointers, mask=tl.arange(0, BLOCK)[:, None] < rows, other=0.0)


@triton.jit
def next_on_diagonal(batch, key_tile, key_begin, steps, last):
    """Return batch row and key tile of the next step on a diagonal; the last row begins again.

    Args:
        batch: batch row of a step.
        key_tile: its tile of keys.
        key_begin: first tile of keys on the diagonal.
        steps: number of tiles on the diagonal.
        last: batch row after the last one.
    """
    ends_row = key_tile + 1 == key_begin + steps
    batch = tl.minimum(tl.where(ends_row, batch + 1, batch), last - 1)
    return batch, tl.where(ends_row, key_begin, key_tile + 1)


@triton.jit
def table_gradient_kernel(
    Q, K, BAND, KEY_BEGIN, KEY_END, KEY_PARTS, QUERY_PARTS, batches, heads, length, near, width,
    splits, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, C2P: tl.constexpr,
    P2C: tl.constexpr, RANGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Sum one diagonal over a share of the batch rows.

    Arguments not listed are those of ``forward.forward_kernel`` and ``backward.key_kernel``.

    Args:
        BAND: dS as described in ``backward``.
        KEY_PARTS: float32 ``[splits, 2, heads, 2 * near, BLOCK, HEAD_DIM]``, each diagonal's
            gradient of its blocks of greater and of lesser distances.
        QUERY_PARTS: the same for the table of negated distances.
        splits: shares of the batch rows.
        CHUNK: features that a program sums.
    """
    tiles = tl.cdiv(length, BLOCK)
    # The longest diagonals, in the middle, come first.
    order = tl.program_id(0)
    diagonal = near + (order + 1) // 2 * (1 - 2 * (order % 2))
    offset = diagonal - near
    head = (tl.program_id(1) % heads).to(tl.int64)
    chunk = tl.program_id(1) // heads
    split = tl.program_id(2)

    key_begin = tl.maximum(0, -offset)
    steps = tl.maximum(tl.minimum(tiles, tiles - offset) - key_begin, 0)
    if offset == -near:  # a block of the table, but no diagonal of the band
        steps = 0
    first = split * batches // splits
    last = (split + 1) * batches // splits
    dtype: tl.constexpr = Q.pointer.dtype.element_ty

    key_high = tl.zeros([BLOCK, CHUNK], tl.float32)
    key_low = tl.zeros([BLOCK, CHUNK], tl.float32)
    query_high = tl.zeros([BLOCK, CHUNK], tl.float32)
    query_low = tl.zeros([BLOCK, CHUNK], tl.float32)
    # Each step loads the tile of the next one. Loaded where it is used, it would be pipelined
    # through shared memory in an order with bank conflicts. The place of the next tile has
    # variables of its own: what the pipelined loads of Q and K depend on is computed at the end of
    # a step, and this load would wait for it.
    batch, key_tile = first, key_begin
    next_batch, next_key_tile = next_on_diagonal(batch, key_tile, key_begin, steps, last)
    following = tl.zeros([BLOCK, BLOCK], dtype)
    if steps * (last - first) > 0:
        following = diagonal_tile(
            BAND, KEY_BEGIN, KEY_END, batch, key_tile, offset, head, heads, length, width, RANGES,
            BLOCK,
        )  # fmt: skip
    for step in range(0, steps * (last - first)):
        d_scores = following
        # The last step loads a tile that is not used.
        following = diagonal_tile(
            BAND, KEY_BEGIN, KEY_END, next_batch, next_key_tile, offset, head, heads, length, width,
            RANGES, BLOCK,
        )  # fmt: skip
        by_query_high, by_query_low, by_key_high, by_key_low = block_parts(
            d_scores, opaque_zero(length, step), dtype, C2P, P2C, BLOCK
        )
        if C2P:
            key_high, key_low = add_blocks(
                key_high, key_low, by_query_high, by_query_low, Q, batch.to(tl.int64), head,
                (key_tile + offset) * BLOCK, length, CHUNK, chunk, EVEN, BLOCK,
            )  # fmt: skip
        if P2C:
            query_high, query_low = add_blocks(
                query_high, query_low, by_key_high, by_key_low, K, batch.to(tl.int64), head,
                key_tile * BLOCK, length, CHUNK, chunk, EVEN, BLOCK,
            )  # fmt: skip
        batch, key_tile = next_on_diagonal(batch, key_tile, key_begin, steps, last)
        next_batch, next_key_tile = next_on_diagonal(
            next_batch, next_key_tile, key_begin, steps, last
        )

    part = heads * 2 * near * BLOCK * HEAD_DIM
    start = (split.to(tl.int64) * 2 * heads + head) * 2 * near + diagonal
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    rows = tl.arange(0, BLOCK)[:, None] * HEAD_DIM + columns[None, :]
    rows += start * BLOCK * HEAD_DIM
    if C2P:
        tl.store(KEY_PARTS + rows, key_high)
        tl.store(KEY_PARTS + rows + part, key_low)
    if P2C:
        tl.store(QUERY_PARTS + rows, query_high)
        tl.store(QUERY_PARTS + rows + part, query_low)


@triton.jit
def sum_rows(PARTS, block, blocks, row, inside, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Sum one row of each of several blocks of ``[blocks, BLOCK, HEAD_DIM]``.

    Blocks beyond the last count as zero.

    Args:
        PARTS: float32, the blocks of one head and split.
        block: block of each row, int32 ``[CHUNK]``.
        blocks: number of blocks.
        row: rows of the linear table, int32 ``[CHUNK]``; row modulo BLOCK is read.
        inside: bool ``[CHUNK]``; False: counts as zero.
        BLOCK: rows per block.
        HEAD_DIM: features per head.
    """
    offsets = (block * BLOCK + row % BLOCK)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    mask = (inside & (block < blocks))[:, None]
    return tl.sum(tl.load(PARTS + offsets, mask=mask, other=0.0), 0)


@triton.jit
def fold_kernel(
    PARTS, ENDS, ROWS, OUT, heads, near, splits, end_splits, scale,
    NEGATED: tl.constexpr, FAR: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of all rows of the linear table that are copies of one slot.

    Args:
        PARTS: float32, of ``table_gradient_kernel``.
        ENDS: float32, of ``far.end_gradient_kernel``; read only with FAR.
        ROWS: int32 ``[slots, 2]``, first and one past the last row of each slot.
        OUT: ``[heads, slots, HEAD_DIM]``, contiguous.
        near: half the blocks of the linear table.
        splits: of PARTS.
        end_splits: of ENDS.
        scale: scale of the scores.
        NEGATED: the table holds negated distances.
        FAR: whether some tiles lie beyond the table.
        CHUNK: rows added up at once.
        heads: number of heads.
        BLOCK: rows per block.
        HEAD_DIM: features per head.
    """
    slot = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    begin = tl.load(ROWS + 2 * slot)
    end = tl.load(ROWS + 2 * slot + 1)
    blocks = 2 * near
    size = blocks * BLOCK * HEAD_DIM
    total = tl.zeros([HEAD_DIM], tl.float32)
    for first in range(begin, end, CHUNK):
        row = first + tl.arange(0, CHUNK)
        # A block holds the greater distances of one diagonal and the lesser ones of the next.
        greater = row // BLOCK
        lesser = greater + 1
        if NEGATED:
            greater = blocks - row // BLOCK
            lesser = greater - 1
        for split in range(0, splits):
            parts = PARTS + (split * 2 * heads + head) * size
            total += sum_rows(parts, greater, blocks, row, row < end, BLOCK, HEAD_DIM)
            parts += heads * size
            total += sum_rows(parts, lesser, blocks, row, row < end, BLOCK, HEAD_DIM)
    columns = tl.arange(0, HEAD_DIM)
    if FAR:
        for side in tl.static_range(2):
            row = side * (blocks * BLOCK - 1)
            if (begin <= row) & (row < end):
                ends = ENDS + (head * 2 + side) * end_splits * HEAD_DIM
                for split in range(0, end_splits):
                    total += tl.load(ends + split * HEAD_DIM + columns)
    out = OUT + (head * tl.num_programs(0) + slot) * HEAD_DIM + columns
    tl.store(out, (total * scale).to(OUT.dtype.element_ty))

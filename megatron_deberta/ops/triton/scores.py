"""Triton helpers shared by the fused kernels: visibility, dropout, softmax and score gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_deberta.ops.triton.tiles import dot


@triton.jit
def visible_range(BEGIN, END, position, length, RANGES: tl.constexpr):
    """Return the first visible position of each position and one past the last.

    Args:
        BEGIN, END: int32 ``[length]``; only with RANGES.
        position: int32 ``[BLOCK]``.
        length: positions in a row.
        RANGES: whether visibility is limited.

    Returns:
        int32 ``[BLOCK]`` each; an empty range for positions outside of the row.
    """
    begin = position * 0
    end = tl.where(position < length, length, 0)
    if RANGES:
        begin = tl.load(BEGIN + position, mask=position < length, other=0)
        end = tl.load(END + position, mask=position < length, other=0)
    return begin, end


@triton.jit
def mix32(x):
    """Apply ``mix`` of ``dropout_bits`` to unsigned 32-bit integers."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_state(dropout, batch, head, DROP: tl.constexpr):
    """Return the dropout hash of a row of the batch and a local head, uint32.

    Args:
        dropout: ``DropoutArguments``.
        batch: row of the batch.
        head: local head.
        DROP: whether there is dropout; otherwise the result is not used.
    """
    state = head.to(tl.uint32)
    if DROP:
        seed = tl.load(dropout.seeds + batch)
        low = (seed & 0xFFFFFFFF).to(tl.uint32)
        high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
        global_head = (head + dropout.head_offset).to(tl.uint32)
        state = mix32(mix32(mix32(low ^ 0x9E3779B9) ^ high) ^ global_head)
    return state


@triton.jit
def tile_pairs(first, BLOCK: tl.constexpr):
    """Return the pair of each position of a tile and whether it is the pair's second.

    As ``pairs`` in a form that shows the compiler which positions of a thread share a pair: one
    pair's hash is then computed once.

    Args:
        first: first position of the tile, a multiple of 16.
        BLOCK: tile size.
    """
    shape: tl.constexpr = [BLOCK // 16, 2, 8]
    pair = first // 2 + 8 * tl.arange(0, BLOCK // 16)[:, None] + tl.arange(0, 8)[None, :]
    pair = tl.reshape(tl.broadcast_to(pair[:, None, :], shape), [BLOCK])
    second = tl.reshape(tl.broadcast_to(tl.arange(0, 2)[None, :, None], shape), [BLOCK])
    return pair, second


@triton.jit
def pairs(position):
    """Return ``pair`` and ``second`` of ``dropout_bits`` of each position."""
    return (position >> 4) * 8 + (position & 7), (position >> 3) & 1


@triton.jit
def keep_mask(state, query_pairs, first_key, dropout, BY_KEY: tl.constexpr, BLOCK: tl.constexpr):
    """Return the dropout mask of a tile, ``[BLOCK, BLOCK]``, True = keep.

    Args:
        state: ``dropout_state``.
        query_pairs: ``tile_pairs`` or ``pairs`` of the queries.
        first_key: position of the tile's first key.
        dropout: ``DropoutArguments``.
        BY_KEY: the tile's rows are keys; otherwise queries.
        BLOCK: tile size.
    """
    query_pair, second_query = query_pairs
    key_pair, second_key = tile_pairs(first_key, BLOCK)
    row_key = mix32(state ^ query_pair.to(tl.uint32))
    column_key = key_pair.to(tl.uint32) * 0x9E3779B9
    # A byte is shifted to the top of the word, where the comparison needs no mask.
    row_shift = (24 - 16 * second_query).to(tl.uint32)
    column_shift = (8 * second_key).to(tl.uint32)
    if BY_KEY:
        word = mix32(row_key[None, :] ^ column_key[:, None])
        top_byte = word << (row_shift[None, :] - column_shift[:, None])
    else:
        word = mix32(row_key[:, None] ^ column_key[None, :])
        top_byte = word << (row_shift[:, None] - column_shift[None, :])
    return top_byte >= (tl.cast(dropout.threshold, tl.uint32) << 24)


@triton.jit
def softmax_step(
    scores, v, row_max, row_sum, accumulator, first_key, key_begin, key_end, state, query_pairs,
    log2_scale, dropout, MASKED: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the online softmax, in base 2.

    Args:
        scores: unscaled, float32 ``[BLOCK, BLOCK]``.
        v: values of the keys.
        row_max: maximum of each query's scores so far, times log2_scale.
        row_sum: sum of 2**(score * log2_scale - row_max) so far.
        accumulator: sum of values with these weights so far.
        first_key: position of the tile's first key.
        key_begin: first visible key of each query; read only with MASKED.
        key_end: one past the last; read only with MASKED.
        state: ``dropout_state``.
        query_pairs: ``tile_pairs`` or ``pairs`` of the queries.
        log2_scale: scale of the scores / ln 2.
        dropout: ``DropoutArguments``.
        MASKED: whether any key is hidden.
        DROP: whether there is dropout.
        BLOCK: tile size.

    Returns:
        The new row_max, row_sum and accumulator.
    """
    if MASKED:
        key = first_key + tl.arange(0, BLOCK)
        visible = (key[None, :] >= key_begin[:, None]) & (key[None, :] < key_end[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    # Scaled after the maximum, so that the scale is part of the fused multiply-add below.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * log2_scale)
    base = new_max
    if MASKED:  # avoids inf - inf for queries without a visible key so far
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.math.exp2(scores * log2_scale - base[:, None])
    rescale = tl.math.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    if DROP:
        p = tl.where(keep_mask(state, query_pairs, first_key, dropout, False, BLOCK), p, 0.0)
    accumulator = dot(p.to(v.dtype), v, accumulator * rescale[:, None])
    return new_max, row_sum, accumulator


@triton.jit
def softmax_result(row_max, row_sum, keep_scale):
    """Return the factor on the accumulator and the log2-sum-exp2; 0 and -inf if nothing is visible.

    Args:
        row_max: of ``softmax_step``.
        row_sum: of ``softmax_step``.
        keep_scale: factor on kept elements.
    """
    hidden = row_sum == 0.0
    factor = tl.where(hidden, 0.0, keep_scale / tl.where(hidden, 1.0, row_sum))
    log2_sum = row_max + tl.math.log2(tl.where(hidden, 1.0, row_sum))
    return factor, tl.where(hidden, float("-inf"), log2_sum)


@triton.jit
def signed_probabilities(
    scores, lse2, visible, state, query_pairs, first_key, log2_scale, dropout,
    BY_KEY: tl.constexpr, MASKED: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return probabilities, negated where dropout drops: one register per element for both.

    Args:
        scores: unscaled, float32 ``[BLOCK, BLOCK]``.
        lse2: log2-sum-exp2 of the queries ``[BLOCK]``.
        visible: mask like ``scores``; read only with MASKED.
        state: ``dropout_state``.
        query_pairs: ``tile_pairs`` or ``pairs`` of the queries.
        first_key: position of the tile's first key.
        log2_scale: scale of the scores / ln 2.
        dropout: ``DropoutArguments``.
        BY_KEY: the tile's rows are keys; otherwise queries.
        MASKED: whether any key is hidden.
        DROP: whether there is dropout.
        BLOCK: tile size.
    """
    lse2 = lse2[None, :] if BY_KEY else lse2[:, None]
    p = tl.math.exp2(scores * log2_scale - lse2)
    if MASKED:
        p = tl.where(visible, p, 0.0)
    if DROP:
        keep = keep_mask(state, query_pairs, first_key, dropout, BY_KEY, BLOCK)
        p = tl.where(keep, p, -p)
    return p


@triton.jit
def score_gradient(signed, products, delta, keep_scale, DROP: tl.constexpr):
    """Return the gradient of the scaled scores.

    Args:
        signed: ``signed_probabilities``.
        products: products of the output's gradient with the values.
        delta: products of the output with its gradient, per query.
        keep_scale: factor on kept elements.
        DROP: whether there is dropout.
    """
    if DROP:
        # Multiplied after the selection, so that it is part of a fused multiply-add.
        products = tl.where(signed > 0, products, 0.0) * keep_scale
    return tl.abs(signed) * (products - delta)

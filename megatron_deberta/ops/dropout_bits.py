"""Counter-based dropout bits: a function of the element's position, without generator state.

All backends and parallel layouts use the same integer function, so tensor parallelism,
recomputation and resume drop the same elements. All arithmetic is modulo 2**32::

    mix(x):           x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    row(head, x)    = mix(mix(mix(mix(low ^ 0x9e3779b9) ^ high) ^ head) ^ x)
    word(head, x, y)= mix(row(head, x) ^ (0x9e3779b9 * y))
    dropped         = byte < round(256 * p)

Hidden states, at a position and a feature::

    byte = (word(0, position, feature // 4) >> (8 * (feature % 4))) & 255

Attention probabilities, at a query and a key, which are positions in the row::

    pair(x)   = 8 * (x // 16) + x % 8          second(x) = x // 8 % 2
    byte = (word(head, pair(query), pair(key)) >> (16 * second(query) + 8 * second(key))) & 255

so a word serves the queries q and q + 8 and the keys k and k + 8. One thread of a tensor-core
product has these four elements, with queries and with keys as rows.

``low`` and ``high`` are the halves of the row's 64-bit seed, ``head`` the global head; shifts are
logical, divisions round down. ``mix`` is the finaliser "lowbias32" of
https://github.com/skeeto/hash-prospector. Eight bits per element make p a multiple of 1/256: the
rate is round(256 p) / 256 and the scale is computed from that rate, so the expectation is exact.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_deberta.hashing import GOLDEN_GAMMA, MASK64, finalize, finalize_tensor

_GOLDEN_32 = 0x9E3779B9 - (1 << 32)
_SIGNED_GAMMA = GOLDEN_GAMMA - (1 << 64)
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B - (1 << 32)
_ONE_THREAD = 1 << 15
"""Elements below which an operation of torch runs on one thread of a CPU."""


def drop_threshold(dropout_p: float) -> int:
    """Return the byte below which elements are dropped: round(256 p).

    Raises:
        ValueError: the probability is below 0 or rounds to 1.
    """
    threshold = round(256 * dropout_p) if 0 <= dropout_p < 1 else 256
    if threshold > 255:
        raise ValueError(f"dropout_p: got {dropout_p}, expected 0 <= dropout_p < 0.998")
    return threshold


def keep_scale(dropout_p: float) -> float:
    """Return the factor on kept elements: 256 / (256 - round(256 p))."""
    return 256 / (256 - drop_threshold(dropout_p))


def row_keys(seed: Tensor, q_positions: Tensor, num_heads: int, head_offset: int) -> Tensor:
    """Return ``row`` of the module docstring.

    Args:
        seed: int64 ``[batch]``.
        q_positions: positions, or pairs of queries, ``[batch, q_len]`` or ``[q_len]``.
        num_heads: local heads.
        head_offset: global index of the first local head.

    Returns:
        int32 ``[batch, num_heads, q_len]``.
    """
    low = (((seed & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)
    high = (seed >> 32).to(torch.int32)
    device = seed.device
    head = torch.arange(head_offset, head_offset + num_heads, dtype=torch.int32, device=device)
    state = _mix32_(_mix32_(low ^ _GOLDEN_32) ^ high)
    state = _mix32_(state[:, None] ^ head)
    query = torch.atleast_2d(q_positions).to(torch.int32)
    return _mix32_(state[:, :, None] ^ query[:, None, :])


def random_words(rows: Tensor, num_words: int, first: int = 0) -> Tensor:
    """Return the random word of each (row, column).

    Args:
        rows: row keys, int32, any shape.
        num_words: columns, counted from ``first``.
        first: index of the first column.

    Returns:
        int32 ``[*rows.shape, num_words]``.
    """
    last = first + num_words
    columns = torch.arange(first, last, dtype=torch.int32, device=rows.device) * _GOLDEN_32
    return _mix32_(rows.unsqueeze(-1) ^ columns)


def random_bytes(rows: Tensor, num_features: int) -> Tensor:
    """Return the uniform byte of each (row, feature) of hidden states.

    Args:
        rows: row keys, int32, any shape.
        num_features: features.

    Returns:
        uint8 ``[*rows.shape, num_features]``; int32 under ``torch.compile``.
    """
    words = random_words(rows, -(-num_features // 4))
    # Byte k % 4 of a word, least significant first: the memory order of little-endian machines.
    if torch.compiler.is_compiling():
        # The view would split a fused kernel in two; eager shifts would take four passes.
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=words.device)
        split = ((words.unsqueeze(-1) >> shifts) & 0xFF).flatten(-2)
        return split[..., :num_features]
    return words.view(torch.uint8)[..., :num_features]


def keep_mask(seed: Tensor, positions: Tensor, num_features: int, dropout_p: float) -> Tensor:
    """Return the dropout mask of hidden states.

    Args:
        seed: int64 ``[batch]``, one per row.
        positions: integers ``[batch, length]`` or ``[length]`` (the same in every row).
        num_features: features.
        dropout_p: dropout probability, rounded to a multiple of 1/256.

    Returns:
        bool ``[batch, 1, length, num_features]``, True = keep, on the seed's device.

    Raises:
        ValueError: the probability is below 0 or rounds to 1.
    """
    threshold = drop_threshold(dropout_p)
    return random_bytes(row_keys(seed, positions, 1, 0), num_features) >= threshold


def pairs(positions: Tensor) -> Tensor:
    """Return ``pair`` of the module docstring.

    Args:
        positions: integers, any shape.
    """
    return (positions >> 4) * 8 + (positions & 7)


def pairs_of(queries: slice) -> slice:
    """Return the pairs of the blocks of 16 that consecutive queries are in."""
    return slice(queries.start // 16 * 8, -(-queries.stop // 16) * 8)


def consecutive_bytes(rows: Tensor, queries: slice, num_keys: int) -> Tensor:
    """Return the uniform byte of each query and key of attention, for consecutive queries.

    Args:
        rows: ``row_keys`` of the pairs ``pairs_of(queries)``, any shape before.
        queries: positions of the queries.
        num_keys: keys, counted from 0.

    Returns:
        uint8 ``[..., queries, num_keys]``.
    """
    blocks = -(-num_keys // 16)
    words = random_words(rows, 8 * blocks).unflatten(-2, (-1, 8))
    # Eight bytes of consecutive keys are moved at once, as an integer.
    out = rows.new_empty((*words.shape[:-2], 2, 8, blocks, 2), dtype=torch.int64)
    for byte in range(4):
        if byte:
            words >>= 8
        out[..., byte // 2, :, :, byte % 2] = _eight_bytes(words)
    return _consecutive(out.view(torch.uint8).flatten(-2), queries, num_keys)


def consecutive_keep(rows: Tensor, queries: slice, num_keys: int, threshold: int) -> Tensor:
    """Compute ``consecutive_bytes(rows, queries, num_keys) >= threshold`` with strided reads.

    For GPUs, where moving the bytes costs 13 bytes of memory traffic per element. On CPUs, in
    cache, moving them and comparing whole vectors is faster.

    Args:
        rows: as in ``consecutive_bytes``.
        queries: positions of the queries.
        num_keys: keys, counted from 0.
        threshold: ``drop_threshold``.

    Returns:
        bool ``[..., queries, num_keys]``, True = keep.
    """
    blocks = -(-num_keys // 16)
    words = random_words(rows, 8 * blocks).view(torch.uint8)
    # [..., block of queries, query % 8, block of keys, key % 8, second(query), second(key)]
    elements = words.unflatten(-1, (blocks, 8, 2, 2)).unflatten(-5, (-1, 8))
    elements = elements.movedim((-2, -1), (-5, -2))
    keep = torch.empty(elements.shape, dtype=torch.bool, device=rows.device)
    torch.ge(elements, threshold, out=keep)
    return _consecutive(keep.flatten(-3), queries, num_keys)


def _consecutive(x: Tensor, queries: slice, num_keys: int) -> Tensor:
    """Return ``[..., queries, num_keys]`` of ``[..., blocks of queries, 2, 8, padded keys]``."""
    start = queries.start - 2 * pairs_of(queries).start
    by_query = x.flatten(-4, -2)
    return by_query[..., start : start + queries.stop - queries.start, :num_keys]


def gathered_keep(rows: Tensor, q_positions: Tensor, num_keys: int, threshold: int) -> Tensor:
    """Compute ``gathered_bytes(rows, q_positions, num_keys) >= threshold`` with strided reads.

    Args:
        rows: as in ``gathered_bytes``.
        q_positions: integers that broadcast to ``rows``.
        num_keys: keys, counted from 0.
        threshold: ``drop_threshold``.

    Returns:
        bool ``[..., q_len, num_keys]``, True = keep.
    """
    blocks = -(-num_keys // 16)
    words = random_words(rows, 8 * blocks)
    words >>= ((q_positions & 8) << 1).to(torch.int32).unsqueeze(-1)
    elements = words.view(torch.uint8).unflatten(-1, (blocks, 8, 4))[..., :2].transpose(-1, -2)
    keep = torch.empty(elements.shape, dtype=torch.bool, device=rows.device)
    torch.ge(elements, threshold, out=keep)
    return keep.flatten(-3)[..., :num_keys]


def gathered_bytes(rows: Tensor, q_positions: Tensor, num_keys: int) -> Tensor:
    """Return the uniform byte of each query and key of attention, for queries anywhere.

    Args:
        rows: ``row_keys`` of ``pairs(q_positions)``, ``[..., q_len]``.
        q_positions: integers that broadcast to it.
        num_keys: keys, counted from 0.

    Returns:
        uint8 ``[..., q_len, num_keys]``.
    """
    blocks = -(-num_keys // 16)
    words = random_words(rows, 8 * blocks)
    words >>= ((q_positions & 8) << 1).to(torch.int32).unsqueeze(-1)
    out = rows.new_empty((*rows.shape, blocks, 2), dtype=torch.int64)
    for key in range(2):
        if key:
            words >>= 8
        out[..., key] = _eight_bytes(words)
    return out.view(torch.uint8).flatten(-2)[..., :num_keys]


def _eight_bytes(words: Tensor) -> Tensor:
    """Return the lowest bytes of eight consecutive words as an integer."""
    lowest = words.to(torch.uint8, memory_format=torch.contiguous_format)
    return lowest.view(*words.shape[:-1], words.shape[-1] // 8, 8).view(torch.int64).squeeze(-1)


def attention_keep_mask(
    seed: Tensor,
    q_positions: Tensor,
    num_keys: int,
    dropout_p: float,
    *,
    num_heads: int = 1,
    head_offset: int = 0,
) -> Tensor:
    """Return the dropout mask of attention probabilities.

    Args:
        seed: int64 ``[batch]``, one per row.
        q_positions: integers ``[batch, q_len]`` or ``[q_len]`` (the same in every row).
        num_keys: keys, counted from 0.
        dropout_p: dropout probability, rounded to a multiple of 1/256.
        num_heads: local heads.
        head_offset: global index of the first local head.

    Returns:
        bool ``[batch, num_heads, q_len, num_keys]``, True = keep, on the seed's device.

    Raises:
        ValueError: the probability is below 0 or rounds to 1.
    """
    threshold = drop_threshold(dropout_p)
    at = torch.atleast_2d(q_positions)
    rows = row_keys(seed, pairs(at), num_heads, head_offset)
    return gathered_bytes(rows, at[:, None], num_keys) >= threshold


def mix_seed(*parts: int | Tensor, state: int | Tensor = 0) -> Tensor:
    """Hash integers to a 64-bit seed, one SplitMix64 step per part; the order matters.

    Args:
        *parts: integers (taken modulo 2**64) and integer tensors of any shapes that broadcast
            together.
        state: result for the parts before these.

    Returns:
        int64, of the broadcast shape (0-dimensional for plain integers).
    """
    for part in parts:
        if isinstance(part, Tensor):
            other = state if isinstance(state, Tensor) else _signed(state)
            state = finalize_tensor((part.long() ^ other) + _SIGNED_GAMMA)
        elif isinstance(state, Tensor):
            state = finalize_tensor((state ^ _signed(part)) + _SIGNED_GAMMA)
        else:
            # On the host, until the first tensor
            state = finalize(((state ^ (part & MASK64)) + GOLDEN_GAMMA) & MASK64)
    if isinstance(state, Tensor):
        return state
    return torch.tensor(_signed(state), dtype=torch.int64, device="cpu")


def _signed(number: int) -> int:
    """Return the signed integer with the lower 64 bits of a number."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix32_(x: Tensor) -> Tensor:
    """Apply ``mix`` of the module docstring in place to an int32 tensor."""
    # A subclass, such as that of FakeTensorMode, may have no memory.
    is_plain = type(x) is Tensor and not torch.compiler.is_compiling()
    if is_plain and x.device.type == "cpu" and x.numel() < _ONE_THREAD:
        # For few elements a call costs more than the arithmetic, and NumPy's calls are cheaper.
        words = x.numpy().view(np.uint32)
        words ^= words >> 16
        words *= _MULTIPLY_1
        words ^= words >> 15
        words *= _MULTIPLY_2 + (1 << 32)
        words ^= words >> 16
        return x
    # torch shifts int32 arithmetically; the masks make the shifts logical.
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _MULTIPLY_1
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _MULTIPLY_2
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x

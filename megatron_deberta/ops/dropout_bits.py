"""Counter-based dropout bits: a function of the element's position, without generator state.

All backends and parallel layouts use the same integer function, so tensor parallelism,
recomputation and resume drop the same elements. All arithmetic is modulo 2**32::

    mix(x):   x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    row     = mix(mix(mix(mix(low ^ 0x9e3779b9) ^ high) ^ head) ^ query)
    word    = mix(row ^ (0x9e3779b9 * (key // 4)))
    byte    = (word >> (8 * (key % 4))) & 255
    dropped = byte < round(256 * p)

``low`` and ``high`` are the halves of the row's 64-bit seed, ``head`` the global head, ``query``
and ``key`` positions in the row; shifts are logical. ``mix`` is the finaliser "lowbias32" of
https://github.com/skeeto/hash-prospector. Eight bits per element make p a multiple of 1/256: the
rate is round(256 p) / 256 and the scale is computed from that rate, so the expectation is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_deberta.hashing import GOLDEN_GAMMA, MASK64, finalize, finalize_tensor

_GOLDEN_32 = 0x9E3779B9 - (1 << 32)
_SIGNED_GAMMA = GOLDEN_GAMMA - (1 << 64)
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B - (1 << 32)


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
    """Return the part of the hash that does not depend on the key.

    Args:
        seed: int64 ``[batch]``.
        q_positions: integers ``[batch, q_len]`` or ``[q_len]``.
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


def random_bytes(rows: Tensor, num_keys: int, key_offset: int = 0) -> Tensor:
    """Return the uniform byte of each (row, key).

    Args:
        rows: row keys, int32, any shape.
        num_keys: keys, counted from ``key_offset``.
        key_offset: position of the first key.

    Returns:
        uint8 ``[*rows.shape, num_keys]``; int32 under ``torch.compile``.
    """
    first = key_offset // 4
    last = -(-(key_offset + num_keys) // 4)
    words = random_words(rows, last - first, first)
    # Byte k % 4 of a word, least significant first: the memory order of little-endian machines.
    start = key_offset - 4 * first
    if torch.compiler.is_compiling():
        # The view would split a fused kernel in two; eager shifts would take four passes.
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=words.device)
        split = ((words.unsqueeze(-1) >> shifts) & 0xFF).flatten(-2)
        return split[..., start : start + num_keys]
    return words.view(torch.uint8)[..., start : start + num_keys]


def keep_mask(
    seed: Tensor,
    q_positions: Tensor,
    num_keys: int,
    dropout_p: float,
    *,
    num_heads: int = 1,
    head_offset: int = 0,
    key_offset: int = 0,
) -> Tensor:
    """Return the dropout mask. Hidden dropout uses one head and features as keys.

    Args:
        seed: int64 ``[batch]``, one per row.
        q_positions: integers ``[batch, q_len]`` or ``[q_len]`` (the same in every row).
        num_keys: keys, counted from ``key_offset``.
        dropout_p: dropout probability, rounded to a multiple of 1/256.
        num_heads: local heads.
        head_offset: global index of the first local head.
        key_offset: position of the first key.

    Returns:
        bool ``[batch, num_heads, q_len, num_keys]``, True = keep, on the seed's device.

    Raises:
        ValueError: the probability is below 0 or rounds to 1.
    """
    threshold = drop_threshold(dropout_p)
    rows = row_keys(seed, q_positions, num_heads, head_offset)
    return random_bytes(rows, num_keys, key_offset) >= threshold


def mix_seed(*parts: int | Tensor, state: int | Tensor = 0) -> Tensor:
    """Hash integers to a 64-bit seed, one SplitMix64 step per part; the order matters.

    Args:
        *parts: integers (taken modulo 2**64) and integer tensors that broadcast together.
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
    # torch shifts int32 arithmetically; the masks make the shifts logical.
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _MULTIPLY_1
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _MULTIPLY_2
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x

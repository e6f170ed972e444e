"""Counter-based random numbers: every draw is a function of its key, and no generator has state."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.data import Bits, Integers
from megatron_deberta.hashing import (
    GOLDEN_GAMMA,
    MASK64,
    MULTIPLIERS,
    finalize,
    finalize_array,
)

_FEISTEL_ROUNDS = 6


class Purpose(IntEnum):
    """Separates the random streams of a run. The values determine its samples and never change."""

    DOCUMENT_ORDER = 1
    ROW_ORDER = 2
    SPLIT = 3
    TRAINING_MASK = 4
    VALIDATION_MASK = 5
    PAIR_CUT = 6
    PAIR_PARTNER = 7
    STATIC_MASK = 8
    SHORT_ROWS = 9
    EXAMPLE_ORDER = 10
    BATCH_ORDER = 11
    PHASE_ROWS = 12
    STEP_FORM = 13
    DECODER_MASK = 14


def mix64(*parts: int) -> int:
    """Hash integers to 64 bits; the order of the parts matters.

    Source: the finaliser of SplitMix64 (Steele et al. 2014), applied after each part.
    """
    state = 0
    for part in parts:
        state = finalize((state + part + GOLDEN_GAMMA) & MASK64)
    return state


def hash_values(key: int, values: npt.NDArray[Any]) -> Bits:
    """Return uint64 hashes of integers under ``key``, shaped as ``values``.

    ``hash_values(mix64(a, b), [c])`` is ``[mix64(a, b, c)]``; for one key it is injective.
    """
    state = values.astype(np.uint64)
    state += np.uint64((key + GOLDEN_GAMMA) & MASK64)
    return finalize_array(state)


def draws(keys: Bits, counts: Integers, stream: int) -> Bits:
    """Draw 64 random bits for each element of each group.

    Element j of group g is output j of SplitMix64 seeded with ``keys[g]``, independent of the
    other groups.

    Args:
        keys: [G] uint64 hashes.
        counts: [G] int64 number of elements per group.
        stream: 0, 1, ...: streams of one key do not overlap.

    Returns:
        [sum(counts)] uint64, group after group.
    """
    begins = counts.cumsum() - counts
    first = keys - begins.astype(np.uint64) * np.uint64(GOLDEN_GAMMA)
    first += np.uint64((((stream << 40) + 1) * GOLDEN_GAMMA) & MASK64)
    state: Bits = np.arange(int(counts.sum()), dtype=np.uint64)
    state *= np.uint64(GOLDEN_GAMMA)
    state += first.repeat(counts)
    return finalize_array(state)


def keyed_generator(*parts: int) -> np.random.Generator:
    """Return a new Philox generator whose 128-bit key is a function of ``parts``."""
    key = np.array([mix64(*parts), mix64(len(parts), *parts)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


class KeyedPermutation:
    """Pseudo-random permutation of 0..size-1 in constant memory.

    A Feistel network over the next even number of bits; values outside the range are mapped again
    until they are inside ("cycle walking"), which keeps it a bijection.

    Args:
        size: number of values, at least 1.
        key: selects the permutation.
    """

    def __init__(self, size: int, key: int) -> None:
        """See the class."""
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._round_keys = [mix64(key, number) for number in range(_FEISTEL_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Return the image of ``index`` in [0, size)."""
        while True:
            left, right = index >> self._half_bits, index & self._half_mask
            for key in self._round_keys:
                mixed = ((right ^ key) * MULTIPLIERS[0]) & MASK64
                mixed = ((mixed ^ (mixed >> 29)) * MULTIPLIERS[1]) & MASK64
                left, right = right, left ^ ((mixed >> 32) & self._half_mask)
            index = left << self._half_bits | right
            if index < self._size:
                return index

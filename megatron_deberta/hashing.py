"""SplitMix64 finaliser for Python integers, NumPy arrays and torch tensors.

Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators". The three
functions give the same bits; only the representation of 64-bit words differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

MASK64 = (1 << 64) - 1
# 2**64 divided by the golden ratio, rounded to an odd number: SplitMix64's increment.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ARRAY_MULTIPLIERS = tuple(np.uint64(multiplier) for multiplier in MULTIPLIERS)
_SIGNED_MULTIPLIERS = tuple(multiplier - (1 << 64) for multiplier in MULTIPLIERS)


def finalize(state: int) -> int:
    """Return the finaliser of an integer in [0, 2**64)."""
    state = ((state ^ (state >> 30)) * MULTIPLIERS[0]) & MASK64
    state = ((state ^ (state >> 27)) * MULTIPLIERS[1]) & MASK64
    return state ^ (state >> 31)


def finalize_array(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finaliser to a uint64 array in place and return the array."""
    state ^= state >> np.uint64(30)
    state *= _ARRAY_MULTIPLIERS[0]
    state ^= state >> np.uint64(27)
    state *= _ARRAY_MULTIPLIERS[1]
    state ^= state >> np.uint64(31)
    return state


def finalize_tensor(state: Tensor) -> Tensor:
    """Return the finaliser of an int64 tensor, whose words are taken as unsigned.

    Args:
        state: int64, any shape.
    """
    # torch shifts int64 arithmetically; the masks make the shifts logical.
    state = (state ^ ((state >> 30) & (MASK64 >> 30))) * _SIGNED_MULTIPLIERS[0]
    state = (state ^ ((state >> 27) & (MASK64 >> 27))) * _SIGNED_MULTIPLIERS[1]
    return state ^ ((state >> 31) & (MASK64 >> 31))

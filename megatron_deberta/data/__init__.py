"""Data of training: shards, rows, masks and loaders; and the types of their NumPy arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]
Booleans = npt.NDArray[np.bool_]

"""Constants of Megatron's indexed dataset format: header, dtype codes, file names.

The codes 6 and 7 are not supported: they mean float64 and float32 in megatron-core and the reverse
in GPT-NeoX.

Source: megatron-core 0.16.1, ``megatron/core/datasets/indexed_dataset.py``.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# Magic, version, dtype code, number of sequences, number of documents + 1.
HEADER = struct.Struct("<9sQBQQ")

DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    8: np.dtype(np.uint16),
}
CODES_OF_DTYPES = {dtype: code for code, dtype in DTYPE_CODES.items()}


def bin_path(prefix: str) -> str:
    """Return the name of the token file of a shard."""
    return f"{prefix}.bin"


def idx_path(prefix: str) -> str:
    """Return the name of the index file of a shard."""
    return f"{prefix}.idx"


def manifest_path(prefix: str) -> str:
    """Return the name of the sidecar manifest of a shard."""
    return f"{prefix}.manifest.json"


def dtype_for_vocab(vocab_size: int) -> np.dtype[Any]:
    """Return the token dtype Megatron uses for a vocabulary: uint16 below 65,500, else int32.

    The bound is below 2^16, since special tokens may be added.
    """
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)

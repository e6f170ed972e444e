"""Megatron's indexed dataset format: header, dtype codes, file names; and names of shards.

The codes 6 and 7 are not supported: they mean float64 and float32 in megatron-core and the reverse
in GPT-NeoX. A shard is named by its prefix, any of its files, or its folder.

Source: megatron-core 0.16.1, ``megatron/core/datasets/indexed_dataset.py``.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_deberta.errors import ConfigError

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


_SUFFIXES = (".idx", ".bin", ".manifest.json")
_WEIGHT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def blend_weight(text: str) -> float | None:
    """Return the weight of a blend; None: the text names a shard, such as ``20241126_1530``."""
    return float(text) if _WEIGHT.fullmatch(text) else None


def shard_prefixes(given: Sequence[str], *, each_once: bool = True) -> list[str]:
    """Return the prefixes of shards in order.

    Of a folder, incomplete shards are included, too: they are damaged.

    Args:
        given: prefixes, names of a shard's files, or folders of shards.
        each_once: omit repeated shards; otherwise only further files of the same shard.

    Raises:
        ConfigError: none is given, or a folder has none.
    """
    names: list[str] = []
    for name in given:
        if os.path.isdir(name):
            files = [path for end in _SUFFIXES for path in Path(name).glob(f"*{end}")]
            if not files:
                raise ConfigError(f"{name}: no shards (*.idx) in this folder")
            names += sorted({f"{_without_suffix(str(path))}.idx" for path in files})
        else:
            names.append(name)
    if not names:
        raise ConfigError("no shard given; give at least one, such as shards/books_text_document")
    once = list(dict.fromkeys(names))
    again = [] if each_once else list((Counter(names) - Counter(once)).elements())
    return [*dict.fromkeys(map(_without_suffix, once)), *map(_without_suffix, again)]


def is_shard(name: str) -> bool:
    """Return whether a name is that of an existing shard, as for `shard_prefixes`."""
    return os.path.isdir(name) or os.path.exists(idx_path(_without_suffix(name)))


def refuse_duplicates(prefixes: Sequence[str], where: str, remedy: str) -> None:
    """Check that no shard is listed twice, under any name.

    Args:
        prefixes: the shards.
        where: beginning of the message, such as the name of a key.
        remedy: end of the message.

    Raises:
        ConfigError: a shard is listed twice.
    """
    seen: dict[str, str] = {}
    for prefix in prefixes:
        path = os.path.realpath(idx_path(prefix))
        if path in seen:
            raise ConfigError(f"{where}{prefix} is listed twice (as {seen[path]}); {remedy}")
        seen[path] = prefix


def refuse_existing(prefixes: Sequence[str]) -> None:
    """Check that no file of the shards to be written exists.

    Raises:
        ConfigError: one does.
    """
    for prefix in prefixes:
        for path in (bin_path(prefix), idx_path(prefix), manifest_path(prefix)):
            if os.path.exists(path):
                raise ConfigError(f"{path}: exists; choose another --output or add --force")


def _without_suffix(name: str) -> str:
    return next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)

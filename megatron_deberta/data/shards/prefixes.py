"""Names of shards: a prefix, any of a shard's files, or a folder of shards."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_deberta.data.shards.format import bin_path, idx_path, manifest_path
from megatron_deberta.errors import ConfigError

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

"""Command-line arguments for shards."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_deberta.errors import ConfigError

_SUFFIXES = (".idx", ".bin", ".manifest.json")


def add_shard_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare shards as positional arguments and as ``--prefix``."""
    parser.add_argument(
        "shards",
        nargs="*",
        metavar="SHARD",
        help="path without .bin/.idx, any file of a shard, or a folder of shards",
    )
    parser.add_argument(
        "--prefix", action="append", default=[], metavar="SHARD", help="the same, as an option"
    )


def add_jobs_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--jobs``."""
    parser.add_argument(
        "--jobs",
        type=_positive,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="number of threads (default: the CPU cores, %(default)s here)",
    )


def shard_names(args: argparse.Namespace, *, each_once: bool = True) -> list[str]:
    """Return the prefixes of the given shards; see ``prefixes_of``."""
    return prefixes_of([*args.prefix, *args.shards], each_once=each_once)


def prefixes_of(given: Sequence[str], *, each_once: bool = True) -> list[str]:
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


def _without_suffix(name: str) -> str:
    return next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number

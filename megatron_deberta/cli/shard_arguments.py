"""The arguments by which subcommands take shards."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_deberta.errors import ConfigError

_SUFFIXES = (".idx", ".bin", ".manifest.json")


def add_shard_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare shards as positional arguments, and ``--prefix`` for each of them."""
    parser.add_argument(
        "shards",
        nargs="*",
        metavar="SHARD",
        help="shard: path without .bin/.idx, or any of its files, or a folder of shards",
    )
    parser.add_argument("--prefix", action="append", default=[], metavar="SHARD", help="the same")


def add_jobs_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--jobs``."""
    parser.add_argument(
        "--jobs",
        type=_positive,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="threads that read and write (default: the CPU cores, %(default)s here)",
    )


def shard_names(args: argparse.Namespace, *, each_once: bool = True) -> list[str]:
    """Return the prefixes that ``add_shard_arguments`` took; see ``prefixes_of``."""
    return prefixes_of([*args.prefix, *args.shards], each_once=each_once)


def prefixes_of(given: Sequence[str], *, each_once: bool = True) -> list[str]:
    """Return the prefixes of shards in order.

    A folder gives a shard of which only some files are there as well: it is damaged, not absent.

    Args:
        given: prefixes, names of a shard's files, or folders of shards.
        each_once: leave out a shard that is named again. Otherwise only its other files are, as a
            glob names them.

    Raises:
        ConfigError: none is given, or a folder holds none.
    """
    names: list[str] = []
    for name in given:
        if os.path.isdir(name):
            files = [path for end in _SUFFIXES for path in Path(name).glob(f"*{end}")]
            if not files:
                raise ConfigError(f"{name}: a folder without shards (*.idx); name a shard")
            names += sorted({f"{_without_suffix(str(path))}.idx" for path in files})
        else:
            names.append(name)
    if not names:
        raise ConfigError("no shard; name at least one, as shards/books_text_document")
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

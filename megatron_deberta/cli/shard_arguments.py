"""Command-line arguments for shards."""

from __future__ import annotations

import argparse
import os

from megatron_deberta.cli.arguments import number
from megatron_deberta.data.shards.format import shard_prefixes


def add_shard_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare shards as positional arguments and as ``--prefix``."""
    parser.add_argument(
        "shards", nargs="*", default=[], metavar="SHARD",
        help="path without .bin/.idx, any file of a shard, or a folder of shards",
    )  # fmt: skip
    parser.add_argument(
        "--prefix", action="append", default=[], metavar="SHARD", help="the same, as an option"
    )


def add_jobs_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--jobs``."""
    parser.add_argument(
        "--jobs", type=number(int, 1), default=len(os.sched_getaffinity(0)), metavar="N",
        help="number of threads (default: the CPU cores, %(default)s here)",
    )  # fmt: skip


def shard_names(args: argparse.Namespace, *, each_once: bool = True) -> list[str]:
    """Return the prefixes of the shards named on the command line."""
    return shard_prefixes([*args.prefix, *args.shards], each_once=each_once)

"""Merge several shards into one, in the order given.

All shards must have the same token type and tokenizer according to their manifests, and contain
either sentences or documents; the copied bytes are checked against the manifests' hashes. Shards
are copied in parallel, and the result appears complete or not at all. After an interruption, start
it again: it starts over. The inputs are not changed.

Example:
  megatron-deberta merge shards/part-*.idx --output shards/books_text_document --jobs 8
"""

from __future__ import annotations

import argparse
import os

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

from megatron_deberta.cli.shard_arguments import add_jobs_argument, add_shard_arguments, shard_names
from megatron_deberta.data.shards.format import bin_path
from megatron_deberta.data.shards.merge import merge_shards


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_shard_arguments(parser)
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="prefix of the merged shard"
    )
    add_jobs_argument(parser)
    parser.add_argument("--force", action="store_true", help="replace an existing shard")


def run(args: argparse.Namespace) -> int:
    """Merge the shards and print a summary."""
    prefixes = shard_names(args, each_once=False)
    paths = [bin_path(prefix) for prefix in prefixes]
    size = sum(os.path.getsize(path) for path in paths if os.path.exists(path))
    console = Console(stderr=True)
    columns = BarColumn(), DownloadColumn(), SpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("merge", total=size)
        manifest = merge_shards(
            prefixes,
            args.output,
            jobs=args.jobs,
            force=args.force,
            advance=lambda count: bar.advance(task, count),
        )
    print(
        f"{args.output}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens, "
        f"{manifest.dtype}, from {len(prefixes)} shards"
    )
    return 0

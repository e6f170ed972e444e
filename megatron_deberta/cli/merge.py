"""Merge several shards into one, in the order given.

All shards must have the same token type and tokenizer according to their manifests, and contain
either sentences or documents; the copied bytes are checked against the manifests' hashes. Shards
are copied in parallel, and the result appears complete or not at all. After an interruption, start
it again: it starts over. The inputs are not changed.

Examples:
  megatron-deberta merge shards/part-*.idx --output shards/books_text_document --workers 8
  mpirun -n 64 megatron-deberta merge shards/part-*.idx --output shards/books_text_document
"""

from __future__ import annotations

import argparse
import contextlib
import os
from functools import partial

from megatron_deberta.cli.executor_arguments import add_executor_arguments, executor_options
from megatron_deberta.cli.shard_arguments import add_shard_arguments, shard_names
from megatron_deberta.data.shards.format import bin_path
from megatron_deberta.data.shards.merge import merge_shards
from megatron_deberta.text.jobs.executors import local_engine, remote_engine, run_calls
from megatron_deberta.text.jobs.progress import ProgressDisplay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_shard_arguments(parser)
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="prefix of the merged shard"
    )
    add_executor_arguments(parser, array=False)
    parser.add_argument("--force", action="store_true", help="replace an existing shard")


def run(args: argparse.Namespace) -> int:
    """Merge the shards and print a summary."""
    executor = executor_options(args)
    with contextlib.ExitStack() as stack:
        remote = stack.enter_context(remote_engine(executor))
        prefixes = shard_names(args, each_once=False)
        engine = remote or stack.enter_context(local_engine(executor.workers))
        display = stack.enter_context(ProgressDisplay("merge", lambda: engine.workers))
        paths = [bin_path(prefix) for prefix in prefixes]
        size = sum(os.path.getsize(path) for path in paths if os.path.exists(path))
        copied = 0

        def advance(count: int) -> None:
            nonlocal copied
            copied += count
            display.advance("copy", size, copied, {"text_bytes": copied})

        advance(0)
        manifest = merge_shards(
            prefixes, args.output, run=partial(run_calls, engine), force=args.force, advance=advance
        )
    print(
        f"{args.output}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens, "
        f"{manifest.dtype}, from {len(prefixes)} shards"
    )
    return 0

"""Turn text into tokenized, memory-mapped shards that Megatron reads too.

Writes PREFIX_KEY_document.bin, .idx and .manifest.json for each key; they appear complete or not
at all, and are the same for any number of workers.

Example:
  megatron-deberta preprocess --input corpus/*.jsonl.gz --tokenizer tokenizer --output shards/corpus
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from megatron_deberta.cli.text_input import add_input_arguments, find_input
from megatron_deberta.errors import ConfigError
from megatron_deberta.preprocess.pipeline import preprocess, read_blocks, shard_prefix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_input_arguments(parser)
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR",
        help="tokenizer directory, SentencePiece model or tokenizer.json",
    )
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="begins the shards' names"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="worker processes; 0 works in this one (default: the CPU cores, %(default)s here)",
    )
    parser.add_argument("--force", action="store_true", help="replace existing shards")


def run(args: argparse.Namespace) -> int:
    """Preprocess, and say what was written."""
    if args.workers < 0:
        raise ConfigError(f"--workers {args.workers}: must be 0 or more")
    keys = list(dict.fromkeys(args.keys))
    with tempfile.TemporaryDirectory() as folder:
        sources = find_input(args, Path(folder) / "standard-input")
        manifests = preprocess(
            sources,
            read_blocks(sources),
            args.tokenizer,
            args.output,
            keys=keys,
            workers=args.workers,
            force=args.force,
        )
    for key, manifest in zip(keys, manifests, strict=True):
        print(
            f"{shard_prefix(args.output, key)}: {manifest.num_documents:,} documents, "
            f"{manifest.num_tokens:,} tokens, {manifest.dtype}"
        )
    return 0

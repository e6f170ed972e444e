"""Check shards: structure, SHA-256, counts and the range of every id; exit 1 if one is damaged.

Every shard is read through, and each problem is named with its file and place:
  - the index: header, sizes, offsets and document boundaries against each other;
  - truncation: the size of .bin against the index;
  - both files' SHA-256 and the counts against the manifest, and the manifest against itself;
  - ids against the vocabulary of --tokenizer, or else of the manifest.

Examples:
  megatron-deberta verify shards/books_text_document
  megatron-deberta verify shards/*.idx --tokenizer tokenizer --jobs 8
"""

from __future__ import annotations

import argparse
import sys

from megatron_deberta.cli.shard_arguments import add_jobs_argument, add_shard_arguments, shard_names
from megatron_deberta.data.shards.verify import ShardReport, verify_shards
from megatron_deberta.errors import EXIT_DONE, EXIT_FAILURE
from megatron_deberta.tokenizer import load_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_shard_arguments(parser)
    parser.add_argument("--tokenizer", default="", help="check that the shards are of this one")
    add_jobs_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Check every shard and print one line each, and one for each problem."""
    prefixes = shard_names(args)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    bad = verify_shards(
        prefixes,
        fingerprint=tokenizer.fingerprint if tokenizer else None,
        vocab_size=tokenizer.vocab_size if tokenizer else None,
        jobs=args.jobs,
        report=_show,
    )
    if bad and len(prefixes) > 1:
        print(f"{bad} of {len(prefixes)} shards are bad", file=sys.stderr)
    return EXIT_FAILURE if bad else EXIT_DONE


def _show(report: ShardReport) -> None:
    for problem in report.problems:
        print(f"{report.prefix}: BAD: {problem}", file=sys.stderr, flush=True)
    if not report.problems:
        print(f"{report.prefix}: {report.summary}", flush=True)

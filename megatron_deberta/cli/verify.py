"""Check shards for damage; exit code 1 if one is damaged.

Every shard is read completely. Each problem is printed with its file and place:
  - index: header, sizes, offsets and document boundaries;
  - truncation: size of .bin and index;
  - manifest: SHA-256 of both files, counts, and the manifest's own hash;
  - token ids: range of the vocabulary of --tokenizer, or else of the manifest.

Examples:
  megatron-deberta verify shards/books_text_document
  megatron-deberta verify shards/*.idx --tokenizer tokenizer --workers 8
"""

from __future__ import annotations

import argparse
import os
import sys

from megatron_deberta.cli.arguments import add_shared, number, shard_names
from megatron_deberta.data.shards.verify import ShardReport, verify_shards
from megatron_deberta.errors import EXIT_DONE, EXIT_FAILURE
from megatron_deberta.tokenizer import load_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_shared(parser, "shards", "--prefix")
    parser.add_argument(
        "--workers", type=number(int, 1), default=len(os.sched_getaffinity(0)), metavar="N",
        help="threads (default: the CPU cores, %(default)s here)",
    )  # fmt: skip
    add_shared(parser, "--tokenizer", help="check that the shards were made with this tokenizer")


def run(args: argparse.Namespace) -> int:
    """Check the shards and print one line per shard or problem."""
    prefixes = shard_names(args)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    bad = verify_shards(
        prefixes,
        fingerprint=tokenizer.fingerprint if tokenizer else None,
        vocab_size=tokenizer.vocab_size if tokenizer else None,
        jobs=args.workers,
        report=_show,
    )
    if bad and len(prefixes) > 1:
        print(f"{bad} of {len(prefixes)} shards are damaged", file=sys.stderr)
    return EXIT_FAILURE if bad else EXIT_DONE


def _show(report: ShardReport) -> None:
    for problem in report.problems:
        print(f"{report.prefix}: BAD: {problem}", file=sys.stderr, flush=True)
    if not report.problems:
        print(f"{report.prefix}: {report.summary}", flush=True)

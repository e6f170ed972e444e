"""Split a corpus into training and validation documents.

OUTPUT gets the folders train and validation with part-*.jsonl (records unchanged), and
summary.json. A hash of its text assigns each document, independently of files, order and the rest
of the corpus; exact copies (except case and whitespace) are assigned alike. For near copies,
  - deduplicate first and split the result, which has none;
  - or give --clusters: near duplicates, directly or through others, are then assigned alike.

After an interruption, run the same command: it resumes.

Examples:
  megatron-deberta split --input clean/part-*.jsonl.zst --output parted --fraction 0.05
  megatron-deberta split --input corpus/*.jsonl.gz --clusters clean --output parted
  megatron-deberta preprocess --input parted/train --tokenizer tokenizer --output shards/train
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_deberta.cli.arguments import add_shared
from megatron_deberta.cli.deduplicate import add_work_arguments
from megatron_deberta.cli.text_job import (
    add_input_arguments,
    not_published,
    open_work,
    print_estimate,
)
from megatron_deberta.text.split import split


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the result")
    parser.add_argument(
        "--fraction", type=float, default=0.05, metavar="F",
        help="expected fraction of validation documents (default: %(default)s, as in the paper)",
    )  # fmt: skip
    add_shared(parser, "--seed", default=0, help="seed of the hash")
    parser.add_argument(
        "--clusters", type=Path, metavar="DIR", help="output of deduplicate for the same documents"
    )
    add_work_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Split and print a summary."""
    if args.estimate:
        from megatron_deberta.planning.text_jobs import estimate_split

        return print_estimate(args, estimate_split)
    with open_work(args, "split") as (sources, options, run_options):
        summary = split(
            sources,
            Path(args.output),
            options,
            fraction=args.fraction,
            seed=args.seed,
            clusters=args.clusters,
            run=run_options,
            compression=args.compress,
        )
    if not summary:
        print(not_published(args.output))
        return
    used = summary["train"] + summary["validation"]
    share = f"{summary['validation'] / used:.2%}"
    # Summaries of earlier versions have no sizes.
    if size := summary.get("train_bytes", 0) + summary.get("validation_bytes", 0):
        share += f", {summary['validation_bytes'] / size:.2%} of the bytes"
    print(
        f"{args.output}: {summary['documents']:,} documents = {summary['train']:,} train + "
        f"{summary['validation']:,} validation ({share}) + "
        f"{sum(summary['quarantined'].values()):,} quarantined"
    )

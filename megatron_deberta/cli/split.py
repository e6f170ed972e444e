"""Part a corpus into training and validation documents without leaks.

OUTPUT gets the folders train and validation with part-*.jsonl (records as they were), and
summary.json. The side of a document is a hash of what it says: it does not depend on files, order
or the rest of the corpus, and exact copies (but for case and whitespace) are on the same side.
For near copies there are two ways:
  - deduplicate first and split what stays: it holds no near copies;
  - or give --clusters: a document and its near copies, and theirs, are then on the same side.

Killed and started again, it goes on where it stopped.

Examples:
  megatron-deberta split --input clean/part-*.jsonl.zst --output parted --fraction 0.05
  megatron-deberta split --input corpus/*.jsonl.gz --clusters clean --output parted
  megatron-deberta preprocess --input parted/train --tokenizer tokenizer --output shards/train
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_deberta.cli.deduplicate import add_work_arguments, refuse_many_bad
from megatron_deberta.cli.text_input import add_input_arguments, read_options
from megatron_deberta.text.deduplicate.pipeline import forget_unfinished
from megatron_deberta.text.deduplicate.progress import StageDisplay
from megatron_deberta.text.readers.sources import find_sources
from megatron_deberta.text.split import split


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_input_arguments(parser, files_only=True)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the result")
    parser.add_argument(
        "--fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="share of validation documents, on average (default: %(default)s, the paper's)",
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed, another split")
    parser.add_argument(
        "--clusters", type=Path, metavar="DIR", help="what deduplicate made of the same documents"
    )
    add_work_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Split, and say how many documents are where."""
    options = read_options(args)
    output = Path(args.output)
    sources = find_sources(
        args.input, file_format=args.format, text_mode=args.text_mode, output=output
    )
    if args.restart:
        forget_unfinished(output)
    with StageDisplay(title="split") as display:
        summary = split(
            sources,
            output,
            options,
            fraction=args.fraction,
            seed=args.seed,
            clusters=args.clusters,
            workers=args.workers,
            compression=args.compress,
            force=args.force,
            advance=display.advance,
        )
    used = summary["train"] + summary["validation"]
    print(
        f"{args.output}: {summary['documents']:,} documents = {summary['train']:,} train + "
        f"{summary['validation']:,} validation ({summary['validation'] / used:.2%}) + "
        f"{sum(summary['quarantined'].values()):,} quarantined"
    )
    return refuse_many_bad(summary, args)

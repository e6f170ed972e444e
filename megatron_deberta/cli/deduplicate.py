"""Remove documents that repeat others, exactly or nearly, from a corpus.

Two documents are exact duplicates if their lower-cased words are the same, and near duplicates if
the Jaccard similarity of their sets of five-word runs is at least 0.7 (Megatron-LM's setting).
Candidates are found by MinHash and compared exactly, so nothing goes that is not one. Of
duplicates the first in input order stays; every document that goes has one that stays.

OUTPUT is a folder: part-*.jsonl (the records as they were), removed.jsonl (which document went,
exact or near, what stays in its place, Jaccard), quarantine.jsonl (records that cannot be used),
summary.json, and clusters.npy for `megatron-deberta split --clusters OUTPUT`.

The work can be killed at any time: the same command goes on where it stopped (from
OUTPUT.unfinished) and gives the same bytes, whatever the number of workers. --plan prints what
time, disk and memory it will take.

Examples:
  megatron-deberta deduplicate --input corpus/*.jsonl.gz --output clean --plan
  megatron-deberta deduplicate --input corpus/*.jsonl.gz --output clean --compress zst
  megatron-deberta preprocess --input clean/part-*.jsonl.zst --tokenizer tokenizer --output shards/c
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from megatron_deberta.cli.text_input import add_input_arguments, read_options
from megatron_deberta.deduplicate.estimate import estimate
from megatron_deberta.deduplicate.output import SUFFIXES
from megatron_deberta.deduplicate.pipeline import deduplicate
from megatron_deberta.deduplicate.progress import StageDisplay
from megatron_deberta.deduplicate.settings import Settings
from megatron_deberta.errors import EXIT_DONE, EXIT_FAILURE
from megatron_deberta.preprocess.records import EMPTY
from megatron_deberta.preprocess.sources import find_sources


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the result")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.7,
        metavar="J",
        help="least Jaccard similarity of near duplicates (default: %(default)s)",
    )
    parser.add_argument(
        "--ngram", type=int, default=5, metavar="N", help="words in a run (default: %(default)s)"
    )
    parser.add_argument(
        "--exact-only", action="store_true", help="keep near duplicates; much less work"
    )
    add_work_arguments(parser)
    parser.add_argument(
        "--plan", action="store_true", help="print time, disk and memory instead of working"
    )


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how the work is done and written, as ``split`` wants it too."""
    parser.add_argument(
        "--compress",
        choices=sorted(SUFFIXES),
        default="none",
        help="of the files of documents (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=_whole_number,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="worker processes; 0 works in this one (default: the CPU cores, %(default)s here)",
    )
    parser.add_argument(
        "--max-bad-percent",
        type=float,
        default=0.1,
        metavar="P",
        help="exit 1 if more of the records cannot be used, empty ones not counted "
        "(default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing folder")


def run(args: argparse.Namespace) -> int:
    """Deduplicate, and say what was removed."""
    settings = Settings(threshold=args.threshold, ngram=args.ngram, exact_only=args.exact_only)
    options = read_options(args)
    sources = find_sources(args.input, file_format=args.format, text_mode=args.text_mode)
    if args.plan:
        print(estimate(sources, options, settings, args.workers))
        return EXIT_DONE
    with StageDisplay() as display:
        summary = deduplicate(
            sources,
            Path(args.output),
            settings,
            options,
            workers=args.workers,
            compression=args.compress,
            force=args.force,
            advance=display.advance,
        )
    removed = summary["removed"]
    print(
        f"{args.output}: {summary['documents']:,} documents = {summary['kept']:,} kept + "
        f"{removed['exact']:,} exact + {removed['near']:,} near duplicates + "
        f"{sum(summary['quarantined'].values()):,} quarantined"
    )
    return refuse_many_bad(summary, args)


def refuse_many_bad(summary: dict[str, Any], args: argparse.Namespace) -> int:
    """Return the exit code: 1, with a line that says why, if too many records cannot be used."""
    quarantined, documents = summary["quarantined"], summary["documents"]
    bad = sum(count for reason, count in quarantined.items() if reason != EMPTY)
    if bad * 100 > documents * args.max_bad_percent:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in quarantined.items())
        print(
            f"megatron-deberta: error: {bad:,} of {documents:,} records cannot be used "
            f"({reasons}), more than {args.max_bad_percent} %; see {args.output}/quarantine.jsonl, "
            "or set --max-bad-percent",
            file=sys.stderr,
        )
        return EXIT_FAILURE
    return EXIT_DONE


def _whole_number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return number

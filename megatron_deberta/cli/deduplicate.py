"""Remove exact and near duplicates from a corpus.

Two documents are exact duplicates if their lower-cased words are the same, and near duplicates if
the Jaccard similarity of their sets of five-word runs is at least 0.7 (Megatron-LM's setting).
Candidates are found by MinHash and then compared exactly. Of duplicates the first in input order
is kept.

OUTPUT is a folder: part-*.jsonl (the kept records, unchanged), removed.jsonl (removed documents,
kind, kept duplicate, Jaccard similarity), quarantine.jsonl (unusable records), summary.json, and
clusters.npy for `megatron-deberta split --clusters OUTPUT`.

After an interruption, run the same command: it resumes from OUTPUT.unfinished. The output does not
depend on the executor or the number of workers. --estimate prints the required time, disk space and
memory.

Examples:
  megatron-deberta deduplicate --input corpus/*.jsonl.gz --output clean --estimate
  megatron-deberta deduplicate --input corpus/*.jsonl.gz --output clean --compress zst
  sbatch --array=0-9 ... megatron-deberta deduplicate --input corpus --output clean
  mpirun -n 64 megatron-deberta deduplicate --executor mpi --input corpus --output clean
  megatron-deberta preprocess --input clean/part-*.jsonl.zst --tokenizer tokenizer --output shards/c
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from megatron_deberta.cli.arguments import refuse_options
from megatron_deberta.cli.text_job import (
    add_input_arguments,
    add_job_arguments,
    not_published,
    open_work,
    print_estimate,
)
from megatron_deberta.errors import ConfigError
from megatron_deberta.text.deduplicate.pipeline import deduplicate
from megatron_deberta.text.deduplicate.sign import Settings
from megatron_deberta.text.jobs.stages import SUFFIXES
from megatron_deberta.text.readers.checks import find_both_sides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the result")
    parser.add_argument(
        "--threshold", type=float, metavar="J",
        help="minimum Jaccard similarity of near duplicates (default: 0.7)",
    )  # fmt: skip
    parser.add_argument("--ngram", type=int, metavar="N", help="words per n-gram (default: 5)")
    parser.add_argument(
        "--exact-only", action="store_true", help="remove exact duplicates only; much faster"
    )
    add_work_arguments(parser)


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that ``deduplicate`` and ``split`` share."""
    parser.add_argument(
        "--compress", choices=sorted(SUFFIXES), default="none", help="compression of the output"
    )
    add_job_arguments(parser, "an existing folder")


def run(args: argparse.Namespace) -> None:
    """Deduplicate and print a summary."""
    if args.exact_only:
        why = "is for near duplicates, not for --exact-only"
        refuse_options(args, ["threshold", "ngram"], why)
    settings = Settings(
        threshold=0.7 if args.threshold is None else args.threshold,
        ngram=5 if args.ngram is None else args.ngram,
        exact_only=args.exact_only,
    )
    if args.estimate:
        from megatron_deberta.planning.text_jobs import estimate_deduplicate

        return print_estimate(args, partial(estimate_deduplicate, settings=settings))
    with open_work(args, "deduplicate") as (sources, options, run_options):
        if sides := find_both_sides(sources):
            raise ConfigError(
                f"--input: {sides[0]} and {sides[1]} are the two sides of a split, which the "
                "output would mix; deduplicate the whole corpus first and split the result"
            )
        summary = deduplicate(
            sources,
            Path(args.output),
            settings,
            options,
            run=run_options,
            compression=args.compress,
        )
    if not summary:
        print(not_published(args.output))
        return
    removed = summary["removed"]
    print(
        f"{args.output}: {summary['documents']:,} documents = {summary['kept']:,} kept + "
        f"{removed['exact']:,} exact + {removed['near']:,} near duplicates + "
        f"{sum(summary['quarantined'].values()):,} quarantined"
    )

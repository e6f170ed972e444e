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
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_deberta.cli.executor_arguments import (
    add_executor_arguments,
    executor_options,
    restart,
)
from megatron_deberta.cli.text_input import (
    add_bad_fraction_argument,
    add_input_arguments,
    add_rerun_arguments,
    open_input,
)
from megatron_deberta.errors import EXIT_DONE, EXIT_FAILURE, ConfigError
from megatron_deberta.text.deduplicate.estimate import estimate
from megatron_deberta.text.deduplicate.output import SUFFIXES
from megatron_deberta.text.deduplicate.pipeline import deduplicate
from megatron_deberta.text.deduplicate.progress import StageDisplay
from megatron_deberta.text.deduplicate.settings import Settings
from megatron_deberta.text.jobs.executors import Engine, ExecutorOptions, remote_engine
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.readers.checks import find_both_sides, name_damaged
from megatron_deberta.text.readers.records import DAMAGED, DEFAULT_ALLOW_BAD, EMPTY, ReadOptions
from megatron_deberta.text.readers.sources import STANDARD_INPUT, Source

NOT_LAST = "{}: this task is done; the last one to finish publishes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the result")
    parser.add_argument(
        "--threshold", type=float, default=0.7, metavar="J",
        help="minimum Jaccard similarity of near duplicates",
    )  # fmt: skip
    parser.add_argument("--ngram", type=int, default=5, metavar="N", help="words per n-gram")
    parser.add_argument(
        "--exact-only", action="store_true", help="remove exact duplicates only; much faster"
    )
    add_work_arguments(parser)
    parser.add_argument(
        "--estimate", action="store_true",
        help="only print how much time, disk and memory it would take",
    )  # fmt: skip


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that ``deduplicate`` and ``split`` share."""
    parser.add_argument(
        "--compress", choices=sorted(SUFFIXES), default="none", help="compression of the output"
    )
    add_executor_arguments(parser)
    add_bad_fraction_argument(parser)
    add_rerun_arguments(parser, "an existing folder")


@contextlib.contextmanager
def open_work(
    args: argparse.Namespace, output: Path
) -> Iterator[tuple[list[Source], ReadOptions, ExecutorOptions, Engine | None]]:
    """Open the engine and the input of a command that writes a folder.

    Yields:
        Input files, what is read of them, and where units run.
    """
    executor = executor_options(args)
    folder = JobFolder(output)
    with remote_engine(executor) as engine:
        folder.refuse_foreign()
        if args.restart:
            restart(folder)
        is_first = executor.share.task == 0
        with open_input(args, folder.path, output=output, is_first=is_first) as (sources, options):
            yield sources, options, executor, engine


def work_options(
    args: argparse.Namespace, executor: ExecutorOptions, engine: Engine | None
) -> dict[str, Any]:
    """Return the options that the functions ``deduplicate`` and ``split`` share."""
    return {
        "workers": executor.workers,
        "engine": engine,
        "share": executor.share,
        "compression": args.compress,
        "force": args.force,
    }


def run(args: argparse.Namespace) -> int:
    """Deduplicate and print a summary."""
    settings = Settings(threshold=args.threshold, ngram=args.ngram, exact_only=args.exact_only)
    output = Path(args.output)
    if args.estimate:
        if STANDARD_INPUT in args.input:
            raise ConfigError("--input -: --estimate needs files")
        folder = JobFolder(output).path
        with open_input(args, folder, output=output) as (sources, options):
            print(estimate(sources, options, settings, executor_options(args).workers))
        return EXIT_DONE
    with open_work(args, output) as (sources, options, executor, engine), StageDisplay() as display:
        if sides := find_both_sides(sources):
            raise ConfigError(
                f"--input: {sides[0]} and {sides[1]} are the two sides of a split, which the "
                "output would mix; deduplicate the whole corpus first and split the result"
            )
        summary = deduplicate(
            sources,
            output,
            settings,
            options,
            advance=display.advance,
            **work_options(args, executor, engine),
        )
    if not summary:
        print(NOT_LAST.format(args.output))
        return EXIT_DONE
    removed = summary["removed"]
    print(
        f"{args.output}: {summary['documents']:,} documents = {summary['kept']:,} kept + "
        f"{removed['exact']:,} exact + {removed['near']:,} near duplicates + "
        f"{sum(summary['quarantined'].values()):,} quarantined"
    )
    return refuse_many_bad(summary, args)


def refuse_many_bad(summary: dict[str, Any], args: argparse.Namespace) -> int:
    """Return the exit code: 1, with a message, if too many records are unusable."""
    quarantined, documents = summary["quarantined"], summary["documents"]
    bad = sum(count for reason, count in quarantined.items() if reason != EMPTY)
    limit = DEFAULT_ALLOW_BAD if args.max_bad_fraction is None else args.max_bad_fraction
    damaged = args.max_bad_fraction is None and quarantined.get(DAMAGED, 0)
    if bad > documents * limit or damaged:
        reasons = ", ".join(
            f"{count:,} {reason}" for reason, count in quarantined.items() if reason != EMPTY
        )
        quarantine = Path(args.output) / "quarantine.jsonl"
        names = f" in {name_damaged(quarantine)}" if quarantined.get(DAMAGED) else ""
        print(
            f"megatron-deberta: error: {bad:,} of {documents:,} records cannot be used "
            f"({reasons}){names}; see {quarantine}, or set --max-bad-fraction",
            file=sys.stderr,
        )
        return EXIT_FAILURE
    return EXIT_DONE

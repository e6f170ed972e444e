"""Tokenize text into memory-mapped shards in Megatron's format.

Writes PREFIX_KEY_document.bin, .idx and .manifest.json for each key, and PREFIX.quarantine.jsonl.
The shards appear complete or not at all, and are identical for any number of workers and nodes.
Finished work is kept in PREFIX.unfinished: after a crash or a time limit, run the same command.

Examples:
  megatron-deberta preprocess --input corpus/*.jsonl.gz --tokenizer tokenizer --output shards/corpus
  srun --ntasks-per-node=1 megatron-deberta preprocess ...      (mpirun alike; no MPI is needed)
  sbatch --array=0-9 ... megatron-deberta preprocess ...        (the last task merges)
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping

from megatron_deberta.cli.arguments import number
from megatron_deberta.cli.text_input import (
    add_bad_fraction_argument,
    add_input_arguments,
    add_rerun_arguments,
    open_input,
)
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.errors import ConfigError
from megatron_deberta.text.preprocess.encoding import EncodingOptions
from megatron_deberta.text.preprocess.merging import quarantine_path, shard_prefixes
from megatron_deberta.text.preprocess.pipeline import RunOptions, preprocess
from megatron_deberta.text.preprocess.workfolder import WorkFolder
from megatron_deberta.text.readers.checks import refuse_both_sides
from megatron_deberta.text.readers.sources import STANDARD_INPUT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_input_arguments(parser)
    parser.add_argument(
        "--tokenizer", required=True, metavar="DIR",
        help="tokenizer directory, SentencePiece model or tokenizer.json",
    )  # fmt: skip
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="prefix of the shards' names"
    )
    parser.add_argument(
        "--workers", type=number(int, 0), metavar="N",
        help="worker processes; 0: use this process (default: the CPU cores, divided among the "
        "ranks of a node)",
    )  # fmt: skip
    parser.add_argument(
        "--sentences", nargs="?", const="en", default="", metavar="LANGUAGE",
        help="store sentences separately (PREFIX_KEY_sentence), split by the rules of this "
        "language (an ISO 639 code; without one: en)",
    )  # fmt: skip
    parser.add_argument(
        "--append-eod", default="", metavar="TOKEN",
        help="append this token, such as [SEP], to each document (default: none; packing adds "
        "[CLS] and [SEP])",
    )  # fmt: skip
    parser.add_argument(
        "--keep-empty", action="store_true",
        help="store records without tokens as documents without sequences, as Megatron-LM does",
    )  # fmt: skip
    parser.add_argument(
        "--sentencepiece", action="store_true",
        help="encode with the SentencePiece library, slower: its ids differ where two "
        "segmentations have nearly the same score",
    )  # fmt: skip
    add_bad_fraction_argument(parser)
    parser.add_argument(
        "--array-task", metavar="K/N",
        help="task K (from 0) of N that share the work; in a SLURM job array this is known",
    )  # fmt: skip
    parser.add_argument(
        "--unit-mb", type=number(float, 1e-6), metavar="MB",
        help="text per unit of work, repeated after a crash (default: 8 to 67 MB, by the size of "
        "the input)",
    )  # fmt: skip
    add_rerun_arguments(parser, "existing shards")


def run(args: argparse.Namespace) -> int:
    """Preprocess and, on the first rank, print a summary."""
    options = _run_options(args)
    if args.sentences and not re.fullmatch("[a-z]{2,3}", args.sentences):
        raise ConfigError(f"--sentences {args.sentences}: must be a code as en or de (ISO 639)")
    if options.size > 1 and (args.restart or STANDARD_INPUT in args.input):
        what = "--restart" if args.restart else "--input -"
        raise ConfigError(f"{what} works in a single process only, not in one of {options.size}")
    folder = WorkFolder(args.output)
    folder.refuse_foreign()
    if args.restart:
        folder.remove()
    with open_input(args, folder.path, is_first=options.rank == 0) as (sources, read):
        refuse_both_sides(sources, args.output)
        manifests = preprocess(
            sources,
            args.tokenizer,
            args.output,
            read=read,
            run=options,
            language=args.sentences,
            unit_bytes=None if args.unit_mb is None else round(args.unit_mb * 1e6),
            encoding=EncodingOptions(
                append_eod=args.append_eod,
                keep_empty=args.keep_empty,
                use_sentencepiece=args.sentencepiece,
            ),
        )
    if options.rank:
        return 0
    prefixes = shard_prefixes(args.output, read.keys, args.sentences)
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        print(
            f"{prefix}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens, "
            f"{manifest.dtype}; of {manifest.documents_in:,} records "
            f"{manifest.documents_empty:,} empty, {manifest.documents_quarantined:,} quarantined"
        )
    if manifests[0].documents_quarantined:
        print(f"{quarantine_path(args.output)} lists the quarantined records")
    return 0


def _run_options(args: argparse.Namespace) -> RunOptions:
    # The meeting point is not used: ranks meet in the folder.
    ranks = read_environment({"MASTER_ADDR": "localhost", "MASTER_PORT": "1", **os.environ})
    task, tasks = _array_task(args.array_task, os.environ)
    workers = args.workers
    if workers is None:
        workers = max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size)
    return RunOptions(
        workers=workers,
        rank=task * ranks.world_size + ranks.rank,
        size=tasks * ranks.world_size,
        allow_bad=args.max_bad_fraction,
        force=args.force,
    )


def _array_task(given: str | None, env: Mapping[str, str]) -> tuple[int, int]:
    """Return the task of a job array, counted from 0, and how many there are."""
    if given is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", given)
        if match is None or not int(match[1]) < int(match[2]):
            raise ConfigError(f"--array-task {given}: must be K/N with K from 0 to N - 1")
        return int(match[1]), int(match[2])
    if "SLURM_ARRAY_TASK_ID" not in env:
        return 0, 1
    task, first, step, count = (
        int(env.get(f"SLURM_ARRAY_TASK_{name}", default))
        for name, default in (("ID", "0"), ("MIN", "0"), ("STEP", "1"), ("COUNT", "1"))
    )
    return min((task - first) // max(step, 1), count - 1), count

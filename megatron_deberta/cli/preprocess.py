"""Tokenize text into memory-mapped shards in Megatron's format.

Writes PREFIX_KEY_document.bin, .idx and .manifest.json for each key, and PREFIX.quarantine.jsonl.
The shards appear complete or not at all, and are identical for any number of workers and nodes.
Finished work is kept in PREFIX.unfinished: after a crash or a time limit, run the same command.

Examples:
  megatron-deberta preprocess --input corpus/*.jsonl.gz --tokenizer tokenizer --output shards/corpus
  mpirun -n 64 megatron-deberta preprocess --executor mpi ...   (srun --mpi=pmix -n 64 alike)
  megatron-deberta preprocess --executor dask --dask tcp://HOST:8786 ...
  sbatch --array=0-9 ... megatron-deberta preprocess ...        (the last task merges)
"""

from __future__ import annotations

import argparse
import re
from functools import partial

from megatron_deberta.cli.arguments import number
from megatron_deberta.cli.text_job import (
    add_input_arguments,
    add_job_arguments,
    not_published,
    open_work,
    print_estimate,
)
from megatron_deberta.errors import ConfigError
from megatron_deberta.text.preprocess.encoding import EncodingOptions
from megatron_deberta.text.preprocess.pipeline import preprocess, quarantine_path, shard_prefixes
from megatron_deberta.text.readers.checks import refuse_both_sides


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
    parser.add_argument(
        "--unit-mb", type=number(float, 1e-6, 1e6), metavar="MB",
        help="text per unit of work, repeated after a crash (default: 8 to 67 MB, by the size of "
        "the input)",
    )  # fmt: skip
    add_job_arguments(parser, "existing shards")


def run(args: argparse.Namespace) -> None:
    """Preprocess and, on the first rank, print a summary."""
    if args.sentences and not re.fullmatch("[a-z]{2,3}", args.sentences):
        raise ConfigError(f"--sentences {args.sentences}: must be a code as en or de (ISO 639)")
    if args.estimate:
        from megatron_deberta.planning.text_jobs import estimate_preprocess

        estimate = partial(estimate_preprocess, tokenizer_path=args.tokenizer)
        return print_estimate(args, estimate, is_folder=False)
    with open_work(args, "preprocess", is_folder=False) as (sources, read, options):
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
    if not manifests:
        print(not_published(args.output))
        return
    prefixes = shard_prefixes(args.output, read.keys, args.sentences)
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        print(
            f"{prefix}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens, "
            f"{manifest.dtype}; of {manifest.documents_in:,} records "
            f"{manifest.documents_empty:,} empty, {manifest.documents_quarantined:,} quarantined"
        )
    if manifests[0].documents_quarantined:
        print(f"{quarantine_path(args.output)} lists the quarantined records")

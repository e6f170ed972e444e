"""Merge several shards into one, in the order given.

All shards must have the same token type and tokenizer according to their manifests, and contain
either sentences or documents; the copied bytes are checked against the manifests' hashes. Shards
are copied in parallel, and the result appears complete or not at all. The inputs are not changed.

After an interruption, run the same command: it resumes from OUTPUT.unfinished.

Examples:
  megatron-deberta merge shards/part-*.idx --output shards/books_text_document --workers 8
  mpirun -n 64 megatron-deberta merge shards/part-*.idx --output shards/books_text_document
"""

from __future__ import annotations

import argparse

from megatron_deberta.cli.arguments import add_shared, shard_names
from megatron_deberta.cli.text_job import add_job_arguments, estimated_workers, open_engine
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.merge import merge_shards


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_shared(parser, "shards", "--prefix")
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="prefix of the merged shard"
    )
    add_job_arguments(parser, "an existing shard", array=False)


def run(args: argparse.Namespace) -> None:
    """Merge the shards and print a summary."""
    if args.estimate:
        from megatron_deberta.planning.text_jobs import estimate_merge

        prefixes = shard_names(args, each_once=False)
        print(estimate_merge(prefixes, args.nodes or 1, estimated_workers(args)))
        return
    with open_engine(args, JobFolder(args.output), "merge") as run_options:
        prefixes = shard_names(args, each_once=False)
        manifest = merge_shards(prefixes, args.output, run=run_options)
    print(
        f"{args.output}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens, "
        f"{manifest.dtype}, from {len(prefixes)} shards"
    )

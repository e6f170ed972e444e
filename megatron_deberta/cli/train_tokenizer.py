"""Train a SentencePiece tokenizer on text.

The output directory has spm.model for SentencePiece, and tokenizer.json and tokenizer_config.json
for Hugging Face's AutoTokenizer and this package. Ids: 0 [PAD], 1 [CLS], 2 [SEP], 3 [UNK], then
the other pieces, [MASK] last.

After an interruption, run the same command: it keeps the part of the sample that it has. A smaller
--vocab-size, where the text supports no larger one, does not sample again. After an error, a
command with other options begins anew.

Example:
  megatron-deberta train-tokenizer --input corpus/*.jsonl.gz --vocab-size 32000 --output tokenizer
"""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path

from megatron_deberta.cli.text_job import (
    add_input_arguments,
    add_job_arguments,
    open_work,
    print_estimate,
)
from megatron_deberta.errors import ConfigError
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.readers.checks import find_both_sides
from megatron_deberta.text.sample import sampled_lines
from megatron_deberta.tokenizer.training import check_settings, refuse_existing, train_sentencepiece

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="directory to create")
    parser.add_argument(
        "--vocab-size", type=int, default=128_000, metavar="N",
        help="vocabulary size with the first four special tokens, without [MASK]",
    )  # fmt: skip
    parser.add_argument(
        "--model-type", choices=("unigram", "bpe"), default="unigram",
        help="algorithm; bpe falls back to bytes for rare characters",
    )  # fmt: skip
    parser.add_argument(
        "--character-coverage", type=float, default=0.9995, metavar="SHARE",
        help="share of the text's characters that the vocabulary covers",
    )  # fmt: skip
    parser.add_argument(
        "--sample-mb", type=float, default=500.0, metavar="MB",
        help="train on an even sample of this size; 0: on all text",
    )  # fmt: skip
    add_job_arguments(parser, "an existing tokenizer", array=False)


def run(args: argparse.Namespace) -> None:
    """Train the tokenizer and print a summary."""
    output = Path(args.output)
    sample_bytes = round(args.sample_mb * 1e6)
    if sample_bytes < 0:
        raise ConfigError(f"--sample-mb {args.sample_mb:g}: must be positive, or 0 for all")
    if args.estimate:
        from megatron_deberta.planning.text_jobs import estimate_train_tokenizer

        estimate = partial(estimate_train_tokenizer, sample_bytes=sample_bytes)
        return print_estimate(args, estimate)
    JobFolder(output).remove_leftovers()
    check_settings(args.vocab_size, args.character_coverage)
    refuse_existing(args.output, args.force)
    with open_work(args, "train-tokenizer") as (sources, options, run_options):
        if sides := find_both_sides(sources):
            logger.warning(
                "warning: the vocabulary is also trained on validation text (%s); to leave it out, "
                "give --input %s", sides[1], sides[0],
            )  # fmt: skip

        def check() -> None:
            refuse_existing(args.output, args.force)

        with sampled_lines(
            sources, output, options, sample_bytes, run=run_options, check=check
        ) as lines:
            tokenizer = train_sentencepiece(
                lines,
                args.output,
                vocab_size=args.vocab_size,
                model_type=args.model_type,
                character_coverage=args.character_coverage,
                force=args.force,
            )
    print(
        f"{args.output}: {tokenizer.num_tokens:,} tokens = {args.vocab_size:,} pieces and [MASK]; "
        f"set model.vocab_size to auto, or to at least {tokenizer.num_tokens}; "
        f"fingerprint {tokenizer.fingerprint}"
    )

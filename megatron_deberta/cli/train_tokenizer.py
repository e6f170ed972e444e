"""Train a SentencePiece tokenizer on text.

The output directory has spm.model for SentencePiece, and tokenizer.json and tokenizer_config.json
for Hugging Face's AutoTokenizer and this package. Ids: 0 [PAD], 1 [CLS], 2 [SEP], 3 [UNK], then
the other pieces, [MASK] last.

Example:
  megatron-deberta train-tokenizer --input corpus/*.jsonl.gz --vocab-size 32000 --output tokenizer
"""

from __future__ import annotations

import argparse
import itertools
import logging
import tempfile
from pathlib import Path

from megatron_deberta.cli.text_input import add_input_arguments, open_input
from megatron_deberta.text.readers.checks import find_both_sides
from megatron_deberta.text.readers.reading import read_texts
from megatron_deberta.tokenizer.training import refuse_existing, train_sentencepiece

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
    parser.add_argument("--force", action="store_true", help="replace an existing tokenizer")


def run(args: argparse.Namespace) -> int:
    """Train the tokenizer and print a summary."""
    refuse_existing(args.output, args.force)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_input(args, Path(folder), is_first=False) as (sources, options),
    ):
        if sides := find_both_sides(sources):
            logger.warning(
                "warning: the vocabulary is also trained on validation text (%s); to leave it out, "
                "give --input %s", sides[1], sides[0],
            )  # fmt: skip
        tokenizer = train_sentencepiece(
            itertools.chain.from_iterable(read_texts(sources, options)),
            args.output,
            vocab_size=args.vocab_size,
            model_type=args.model_type,
            character_coverage=args.character_coverage,
            sample_bytes=round(args.sample_mb * 1e6),
            force=args.force,
        )
    print(
        f"{args.output}: {tokenizer.num_tokens:,} tokens = {args.vocab_size:,} pieces and [MASK], "
        f"model.vocab_size={tokenizer.vocab_size} (rounded up to hundreds, as in the release), "
        f"fingerprint {tokenizer.fingerprint}"
    )
    return 0

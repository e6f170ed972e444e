"""Predict the [MASK] tokens of one or more texts.

MODEL is an export, a downloaded model in the format of Hugging Face or Microsoft, a run, or one of
its checkpoints.

A model trained on little text answers with frequent words where it is not sure. --prior-weight W
subtracts W times the logarithm of each token's frequency in the training shards from its score
(W = 1: pointwise mutual information of token and text); the probabilities printed are those of the
new scores.

Examples:
  megatron-deberta fill-mask exports/base "The capital of France is [MASK]."
  megatron-deberta fill-mask runs/base "The capital of France is [MASK]." --prior-weight 0.3
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_deberta.cli.arguments import add_shared, number, refuse_options
from megatron_deberta.errors import ConfigError, refusals

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_deberta.hf.fill_mask import MaskFiller


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    parser.add_argument(
        "model", metavar="MODEL", help="export, downloaded model, run or checkpoint"
    )
    parser.add_argument("text", nargs="+", metavar="TEXT", help="text with at least one [MASK]")
    parser.add_argument(
        "--top-k", type=number(int, 1), default=5, metavar="K", help="predictions per mask"
    )
    add_shared(parser, "--tokenizer")
    parser.add_argument(
        "--prior-weight", type=number(float, 0), default=0.0, metavar="W",
        help="subtract W times the log-frequency of each token from its score (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--prior-shards", nargs="+", default=[], metavar="SHARD",
        help="shards whose tokens are counted for --prior-weight (default: those of the run)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Print a table of predictions for every [MASK]."""
    if not args.prior_weight:
        refuse_options(args, ["prior_shards"], "needs --prior-weight above 0")
    from megatron_deberta.hf.fill_mask import open_filler

    with refusals():
        filler = open_filler(Path(args.model), args.tokenizer)
        penalty = read_penalty(filler, args.prior_weight, args.prior_shards)
        # All texts before any output, so that an error in one of them comes first.
        answers = [filler.fill(text, args.top_k, penalty) for text in args.text]
    console = Console()
    for text, masks in zip(args.text, answers, strict=True):
        console.print(f"[bold]{escape(text)}[/bold]")
        for place, predictions in enumerate(masks, start=1):
            title = None if len(masks) == 1 else f"{filler.mask_token} {place}"
            table = Table("probability", "token", title=title and escape(title), box=None)
            for prediction in predictions:
                table.add_row(
                    f"{prediction.probability:.4f}",
                    escape(prediction.text.strip() or prediction.piece),
                )
            console.print(table)


def read_penalty(filler: MaskFiller, weight: float, shards: Sequence[str]) -> Tensor | None:
    """Return ``weight`` times the log-frequencies of the tokens, [num_tokens]; None: no weight.

    It is infinite for special tokens.

    Args:
        filler: the model.
        weight: 0 or greater.
        shards: prefixes, files or folders; empty: those that the run was trained on.

    Raises:
        ConfigError: there is a weight, and no shards are given or known.
        DataError: a shard is missing, damaged or of another tokenizer.
    """
    if not weight:
        return None
    # Imported here because they need packages of training.
    import torch

    from megatron_deberta.data.build import parse_prefixes
    from megatron_deberta.data.dataset.corpus import check_tokenizer
    from megatron_deberta.data.dataset.unigram import shard_log_probabilities
    from megatron_deberta.data.shards.format import shard_prefixes
    from megatron_deberta.data.shards.manifest import read_manifest
    from megatron_deberta.data.shards.reader import IndexedDataset

    if shards:
        prefixes = shard_prefixes(shards)
    elif filler.training_data:
        parts, _ = parse_prefixes(filler.training_data, "data.train")
        prefixes = list(dict.fromkeys(prefix for part in parts for prefix in part))
    else:
        raise ConfigError(
            f"--prior-weight {weight}: this model does not say what it was trained on; give the "
            "shards with --prior-shards"
        )
    for prefix in prefixes:
        if (manifest := read_manifest(prefix)) is not None:
            check_tokenizer(prefix, manifest, filler.tokenizer.fingerprint)
    opened = [IndexedDataset(prefix) for prefix in prefixes]
    frequencies = shard_log_probabilities(opened, filler.tokenizer.num_tokens)
    penalty = weight * torch.from_numpy(frequencies).float()
    # Text has none of them, so the division by their frequency would put them first.
    penalty[list(filler.tokenizer.special_ids)] = float("inf")
    return penalty

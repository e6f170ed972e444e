"""Predict the [MASK] tokens of one or more texts.

MODEL is an export, a downloaded model in the format of Hugging Face or Microsoft, a run, or one of
its checkpoints.

Example:
  megatron-deberta fill-mask exports/base "The capital of France is [MASK]."
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_deberta.cli.arguments import number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    parser.add_argument(
        "model", metavar="MODEL", help="export, downloaded model, run or checkpoint"
    )
    parser.add_argument("text", nargs="+", metavar="TEXT", help="text with at least one [MASK]")
    parser.add_argument(
        "--top-k", type=number(int, 1), default=5, metavar="K", help="predictions per mask"
    )
    parser.add_argument(
        "--tokenizer", default="", metavar="DIR", help="tokenizer (default: the model's own)"
    )


def run(args: argparse.Namespace) -> int:
    """Print a table of predictions for every [MASK]."""
    from megatron_deberta.hf.fill_mask import open_filler

    filler = open_filler(Path(args.model), args.tokenizer)
    # All texts before any output, so that an error in one of them comes first.
    answers = [filler.fill(text, args.top_k) for text in args.text]
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
    return 0

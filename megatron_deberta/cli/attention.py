"""Draw the attention maps of a text in one or several models, as PNG or an interactive HTML page.

Each map is shown with the terms of its scores: content to content (c2c), content to position (c2p)
and position to content (p2c), whose sum's softmax it is. MODEL is a run, one of its checkpoints, an
export, or a downloaded model in the format of Hugging Face or Microsoft; several are shown side by
side.

Examples:
  megatron-deberta attention runs/base "The quick brown fox jumps." --output maps.html
  megatron-deberta attention runs/base runs/no-c2p "The fox jumps." --heads mean,3 --output maps.png
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_deberta.cli.arguments import add_shared
from megatron_deberta.errors import ConfigError
from megatron_deberta.files import write_atomically

if TYPE_CHECKING:
    # It imports torch, which --help does not need.
    from megatron_deberta.attention_maps.compute import TextMaps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    parser.add_argument(
        "model", nargs="+", metavar="MODEL", help="run, checkpoint, export or downloaded model"
    )
    parser.add_argument("text", metavar="TEXT", help="text; [CLS] and [SEP] are added")
    parser.add_argument(
        "--layers", metavar="LIST",
        help="layers from 1, separated by commas; -1 or last: the last one; all (default: last; in "
        "HTML all)",
    )  # fmt: skip
    parser.add_argument(
        "--heads", metavar="LIST",
        help="heads from 1, separated by commas; mean: the mean over all; all (default: mean; in "
        "HTML all)",
    )  # fmt: skip
    parser.add_argument(
        "--output", action="append", metavar="FILE",
        help=".html or .png; may be repeated (default: attention.html)",
    )  # fmt: skip
    add_shared(parser, "--tokenizer", help="tokenizer (default: the models' own)")


def run(args: argparse.Namespace) -> None:
    """Write the files and print their names."""
    outputs = [Path(name) for name in args.output or ["attention.html"]]
    for path in outputs:
        if path.suffix not in (".html", ".png"):
            raise ConfigError(f"--output {path}: must end in .html or .png")
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"--output {path}: must be a file in an existing folder")
    if args.text and os.path.isdir(args.text):
        raise ConfigError(f"{args.text} is a folder; the last argument must be the text")
    from megatron_deberta.attention_maps.drawing import draw, write_page
    from megatron_deberta.train.start import refusals

    contents = []
    with refusals():
        for path in outputs:
            is_page = path.suffix == ".html"
            models = _compute(args, "all" if is_page else "")
            contents.append(write_page(models, args.text) if is_page else draw(models))
    for path, content in zip(outputs, contents, strict=True):
        write_atomically(path, content)
        print(f"{path}: {len(content) / 1e6:.1f} MB")


def _compute(args: argparse.Namespace, default: str) -> list[TextMaps]:
    from megatron_deberta.attention_maps.compute import LAST, MEAN, compute_maps

    layers = args.layers or default or LAST
    heads = args.heads or default or MEAN
    found = [
        compute_maps(Path(name), args.text, layers, heads, args.tokenizer) for name in args.model
    ]
    names = [maps.name for maps in found]
    # Folders of equal names are told apart by their paths.
    return [
        replace(maps, name=path) if names.count(maps.name) > 1 else maps
        for maps, path in zip(found, args.model, strict=True)
    ]

"""The arguments by which subcommands take text, and the text they name."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from megatron_deberta.preprocess.sources import Block, Source, iter_blocks


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--input``, ``--input-key``, ``--format`` and ``--text-mode``."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSONL or plain text, also .gz and .zst; files, directories, globs, or - for stdin",
    )
    parser.add_argument(
        "--input-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of the JSON objects that hold text (default: text)",
    )
    parser.add_argument(
        "--format",
        choices=("auto", "jsonl", "text"),
        default="auto",
        help="auto goes by suffix, else by the first character (default: %(default)s)",
    )
    parser.add_argument(
        "--text-mode",
        choices=("line", "paragraph"),
        default="paragraph",
        help="documents of plain text: lines, or what blank lines part (default: %(default)s)",
    )


def iter_input_blocks(sources: Sequence[Source], args: argparse.Namespace) -> Iterator[Block]:
    """Read all sources one after the other, as the arguments say.

    Raises:
        DataError: see ``iter_blocks``.
    """
    for source in sources:
        yield from iter_blocks(source, file_format=args.format, text_mode=args.text_mode)

"""Command-line arguments for text input."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from megatron_deberta.errors import ConfigError
from megatron_deberta.text.readers.reading import ReadOptions
from megatron_deberta.text.readers.sources import Source, find_sources


def add_input_arguments(parser: argparse.ArgumentParser, *, files_only: bool = False) -> None:
    """Declare the arguments; with ``files_only`` without standard input, which is read once."""
    parser.add_argument(
        "--input",
        action="extend",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSONL or plain text, also .gz, .zst, .bz2 and .xz; Parquet; Hugging Face datasets; "
        "files, directories, globs" + ("" if files_only else ", or - for standard input"),
    )
    parser.add_argument(
        "--keys",
        "--input-key",
        action="extend",
        nargs="+",
        metavar="KEY",
        help="keys of the JSON objects, or columns, that hold text (default: text)",
    )
    parser.add_argument(
        "--format",
        choices=("auto", "jsonl", "text"),
        default="auto",
        help="auto: by the suffix, else by the first character (default: %(default)s)",
    )
    parser.add_argument(
        "--text-mode",
        choices=("line", "paragraph"),
        default="paragraph",
        help="documents of plain text: lines, or paragraphs separated by blank lines "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--normalize",
        choices=("none", "nfc", "nfkc"),
        default="none",
        help="Unicode normalization (default: %(default)s)",
    )
    parser.add_argument(
        "--max-document-mb",
        type=float,
        default=100.0,
        metavar="MB",
        help="set longer documents aside (default: %(default)g MB)",
    )


def find_input(args: argparse.Namespace, spool: Path) -> list[Source]:
    """Find the input files; standard input is copied to ``spool``.

    Raises:
        ConfigError, DataError: see ``find_sources``.
    """
    return find_sources(args.input, file_format=args.format, text_mode=args.text_mode, spool=spool)


def read_options(args: argparse.Namespace) -> ReadOptions:
    """Return how to read the input.

    Raises:
        ConfigError: ``--max-document-mb`` is not positive.
    """
    if not 0 < args.max_document_mb < math.inf:
        raise ConfigError(f"--max-document-mb {args.max_document_mb}: must be a number above 0")
    return ReadOptions(
        keys=tuple(dict.fromkeys(args.keys or ["text"])),
        normalization=args.normalize,
        longest_bytes=round(args.max_document_mb * 1e6),
    )

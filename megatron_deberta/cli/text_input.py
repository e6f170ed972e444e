"""Command-line arguments for text input."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_deberta.cli.arguments import number
from megatron_deberta.text.readers.records import DEFAULT_ALLOW_BAD, ReadOptions
from megatron_deberta.text.readers.sources import Source, find_sources


def add_input_arguments(parser: argparse.ArgumentParser, *, files_only: bool = False) -> None:
    """Declare the arguments; with ``files_only`` without standard input, which is read once."""
    parser.add_argument(
        "--input", action="extend", nargs="+", required=True, metavar="FILE",
        help="JSONL or plain text, also .gz, .zst, .bz2 and .xz; Parquet; Hugging Face datasets; "
        "files, directories, globs" + ("" if files_only else ", or - for standard input"),
    )  # fmt: skip
    parser.add_argument(
        "--keys", "--input-key", action="extend", nargs="+", metavar="KEY",
        help="keys of the JSON objects, or columns, that hold text (default: text)",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=("auto", "jsonl", "text"), default="auto",
        help="format of the input; auto: by the suffix, else by the first character",
    )  # fmt: skip
    parser.add_argument(
        "--text-mode", choices=("line", "paragraph"), default="paragraph",
        help="documents of plain text: lines, or paragraphs separated by blank lines",
    )  # fmt: skip
    parser.add_argument(
        "--normalize", choices=("none", "nfc", "nfkc"), default="none",
        help="Unicode normalization of the text",
    )  # fmt: skip
    parser.add_argument(
        "--max-document-mb", type=number(float, 1e-6), default=100.0, metavar="MB",
        help="leave out longer documents, and list them as unusable",
    )  # fmt: skip


def add_bad_fraction_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--max-bad-fraction``."""
    parser.add_argument(
        "--max-bad-fraction", type=number(float, 0, 1), metavar="FRACTION",
        help="accept up to this fraction of unusable records, and damaged files "
        f"(default: {DEFAULT_ALLOW_BAD:g}, and no damaged file; empty records do not count)",
    )  # fmt: skip


def add_rerun_arguments(parser: argparse.ArgumentParser, existing: str) -> None:
    """Declare what becomes of ``existing`` output, and of unfinished work."""
    parser.add_argument("--force", action="store_true", help=f"replace {existing}")
    parser.add_argument(
        "--restart", action="store_true", help="discard the work of an unfinished run"
    )


def find_input(args: argparse.Namespace, **places: Path) -> list[Source]:
    """Find the input files; ``places`` are the ``output`` and ``spool`` of ``find_sources``.

    Raises:
        ConfigError, DataError: see ``find_sources``.
    """
    return find_sources(args.input, file_format=args.format, text_mode=args.text_mode, **places)


def read_options(args: argparse.Namespace) -> ReadOptions:
    """Return how to read the input."""
    return ReadOptions(
        keys=tuple(dict.fromkeys(args.keys or ["text"])),
        normalization=args.normalize,
        longest_bytes=round(args.max_document_mb * 1e6),
    )

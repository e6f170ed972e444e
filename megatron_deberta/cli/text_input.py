"""Command-line arguments for text input."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_deberta.cli.arguments import number
from megatron_deberta.errors import ConfigError
from megatron_deberta.text.readers.checks import check_input
from megatron_deberta.text.readers.records import DEFAULT_ALLOW_BAD, ReadOptions
from megatron_deberta.text.readers.sources import (
    PLAN,
    SPOOLED_INPUT,
    STANDARD_INPUT,
    Source,
    find_sources,
)


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--input", action="extend", nargs="+", required=True, metavar="FILE",
        help="JSONL or plain text, also .gz, .zst, .bz2 and .xz; Parquet; Hugging Face datasets; "
        "files, directories, globs, or - for standard input",
    )  # fmt: skip
    parser.add_argument(
        "--keys", "--input-key", action="extend", nargs="+", metavar="KEY",
        help="keys of the JSON objects, or columns, that hold text, separated by spaces or commas "
        "(default: text)",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=("auto", "jsonl", "text"), default="auto",
        help="format of the input; auto: by the suffix, else by the first character",
    )  # fmt: skip
    parser.add_argument(
        "--text-mode", choices=("auto", "file", "paragraph", "line"), default="auto",
        help="documents of plain text: whole files, paragraphs separated by blank lines, or lines; "
        "auto: the files of a directory, the paragraphs of other files",
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


@contextlib.contextmanager
def open_input(
    args: argparse.Namespace, folder: Path, *, output: Path | None = None, is_first: bool = True
) -> Iterator[tuple[list[Source], ReadOptions]]:
    """Find the input files and check their first records.

    Args:
        args: arguments of the command.
        folder: folder of the unfinished run, in which standard input is kept. A run that is
            refused before it began leaves nothing there.
        output: folder that the command writes; not searched for input.
        is_first: this is the first of several processes; only that one warns.

    Raises:
        ConfigError: a key is missing, or see ``find_sources`` and ``read_options``.
        DataError: see ``find_sources``.
    """
    options = read_options(args)
    sources = find_sources(
        args.input,
        file_format=args.format,
        text_mode=args.text_mode,
        spool=folder / SPOOLED_INPUT,
        output=output,
    )
    try:
        _refuse_unused(args, sources)
        check_input(
            sources,
            options,
            max_bad_fraction=getattr(args, "max_bad_fraction", None),
            warn_short=is_first and args.text_mode == "auto",
        )
        yield sources, options
    except ConfigError:
        if STANDARD_INPUT in args.input and not (folder / PLAN).exists():
            os.unlink(sources[0].path)
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _refuse_unused(args: argparse.Namespace, sources: Sequence[Source]) -> None:
    """Reject options about a kind of input of which there is none.

    Raises:
        ConfigError: one is given.
    """
    plain = [source.text_format in ("file", "paragraph", "line") for source in sources]
    if args.text_mode != "auto" and not any(plain):
        raise ConfigError(f"--text-mode {args.text_mode} is for plain text, of which there is none")
    if args.keys and args.keys != ["text"] and all(plain):
        raise ConfigError(
            f"--keys {' '.join(args.keys)} is for JSON Lines and tables; the input is plain text"
        )


def read_options(args: argparse.Namespace) -> ReadOptions:
    """Return how to read the input.

    Raises:
        ConfigError: a key is empty.
    """
    keys = [key.strip() for entry in args.keys or ["text"] for key in entry.split(",")]
    if "" in keys:
        raise ConfigError(f"--keys {' '.join(args.keys)}: a key is empty")
    return ReadOptions(
        keys=tuple(dict.fromkeys(keys)),
        normalization=args.normalize,
        longest_bytes=round(args.max_document_mb * 1e6),
    )

"""Which files the input is, and their text in blocks of whole records.

Owns expanding paths, telling JSONL from plain text, and cutting. Refuses to look inside records
(``records``).
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.preprocess.compression import read_text_bytes

TextFormat = Literal["jsonl", "line", "paragraph"]
"""A JSON object a line; a document a line; documents separated by blank lines."""

STANDARD_INPUT = "-"
MOST_RECORD_BYTES = 1 << 28
"""A longer record is a file in another format, and would not fit in memory with its copies."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMPRESSED = (".gz", ".zst")
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_TEXT_SUFFIXES = (".txt", ".text")
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
_LONGEST_BLANK_LINE = 1024


@dataclass(frozen=True, slots=True)
class Source:
    """One input file.

    Attributes:
        path: file name, or ``-`` for standard input.
        size_bytes: size on disk, before decompression; 0 where unknown.
    """

    path: str
    size_bytes: int

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return "standard input" if self.path == STANDARD_INPUT else self.path


@dataclass(frozen=True, slots=True)
class Block:
    """Some whole records of a source.

    Attributes:
        source: name of the source.
        text_format: how records are told apart.
        content: their bytes, UTF-8.
        first_line: number of the first line in the source, from 1.
        offset_bytes: where ``content`` begins in the uncompressed source.
        file_bytes: bytes of the file it took, compressed where the file is.
    """

    source: str
    text_format: TextFormat
    content: bytes
    first_line: int
    offset_bytes: int
    file_bytes: int


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """Expand files, directories, globs and ``-``, and check that each can be opened.

    Args:
        inputs: as given on the command line. Directories are searched for text files by suffix,
            hidden ones left out; they and globs are sorted by name. A file named twice counts
            once.

    Raises:
        ConfigError: ``-`` is combined with files.
        DataError: something does not exist, cannot be opened, or holds no text file.
    """
    if STANDARD_INPUT in inputs:
        if len(inputs) > 1:
            raise ConfigError("--input -: standard input cannot be combined with files")
        return [Source(STANDARD_INPUT, 0)]
    paths = [path for entry in inputs for path in _expand(entry)]
    sources = []
    for path in dict.fromkeys(os.path.realpath(path) for path in paths):
        try:
            with open(path, "rb") as stream:
                sources.append(Source(path, os.fstat(stream.fileno()).st_size))
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; check --input") from error
    return sources


def iter_blocks(
    source: Source,
    *,
    file_format: Literal["auto", "jsonl", "text"] = "auto",
    text_mode: Literal["line", "paragraph"] = "paragraph",
    block_bytes: int = 1 << 20,
) -> Iterator[Block]:
    """Read a source in blocks of whole records.

    Args:
        source: what to read.
        file_format: ``auto`` goes by the suffix, else by whether the text begins with ``{``.
        text_mode: what a document is in plain text.
        block_bytes: a block is cut at the last record boundary once it has this size.

    Raises:
        DataError: the file cannot be read, is damaged, or has a record beyond
            ``MOST_RECORD_BYTES``.
    """
    with _open(source) as stream:
        pieces = read_text_bytes(stream, source.name)
        head = _read_head(pieces)
        text_format = _text_format(source, head[0], file_format, text_mode)
        yield from _cut(source, text_format, itertools.chain([head], pieces), block_bytes)


def _cut(
    source: Source,
    text_format: TextFormat,
    pieces: Iterable[tuple[bytes, int]],
    block_bytes: int,
) -> Iterator[Block]:
    buffer = bytearray()
    line, offset, file_bytes, searched = 1, 0, 0, 0
    for piece, taken in pieces:
        buffer += piece
        file_bytes += taken
        if len(buffer) < block_bytes:
            continue
        size = _last_boundary(buffer, searched, text_format)
        searched = len(buffer)
        if size:
            content = bytes(buffer[:size])
            yield Block(source.name, text_format, content, line, offset, file_bytes)
            del buffer[:size]
            line += content.count(b"\n")
            offset += size
            file_bytes = searched = 0
        elif searched > MOST_RECORD_BYTES:
            raise DataError(
                f"{source.name}: line {line} begins a record of more than "
                f"{MOST_RECORD_BYTES >> 20} MiB; check --format and --text-mode, or split it"
            )
    if buffer:
        yield Block(source.name, text_format, bytes(buffer), line, offset, file_bytes)


def _last_boundary(buffer: bytearray, searched: int, text_format: TextFormat) -> int:
    """Return the length of the whole records in ``buffer``; 0 where none is known to be whole."""
    if text_format != "paragraph":
        return buffer.rfind(b"\n", searched) + 1
    size = 0
    for match in _BLANK_LINE.finditer(buffer, max(0, searched - _LONGEST_BLANK_LINE)):
        size = match.end()
    return size


def _read_head(pieces: Iterator[tuple[bytes, int]]) -> tuple[bytes, int]:
    head, taken = b"", 0
    for piece, piece_taken in pieces:
        head += piece
        taken += piece_taken
        if head.strip():
            break
    return head, taken


def _text_format(
    source: Source,
    head: bytes,
    file_format: Literal["auto", "jsonl", "text"],
    text_mode: Literal["line", "paragraph"],
) -> TextFormat:
    if file_format == "auto":
        suffixes = [suffix.lower() for suffix in Path(source.path).suffixes[-2:]]
        suffix = next((entry for entry in reversed(suffixes) if entry not in _COMPRESSED), "")
        if suffix in _TEXT_SUFFIXES:
            return text_mode
        looks_like_json = head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{")
        return "jsonl" if suffix in _JSON_SUFFIXES or looks_like_json else text_mode
    return "jsonl" if file_format == "jsonl" else text_mode


def _expand(entry: str) -> list[str]:
    if os.path.isdir(entry):
        found = sorted(_text_files(entry))
        if not found:
            known = ", ".join((*_JSON_SUFFIXES, *_TEXT_SUFFIXES))
            raise DataError(f"--input {entry}: no file ending in {known} (.gz, .zst) in it")
        return found
    if not os.path.lexists(entry) and glob.has_magic(entry):
        matches = sorted(path for path in glob.glob(entry, recursive=True) if os.path.isfile(path))
        if not matches:
            raise DataError(f"--input {entry}: matches no file")
        return matches
    return [entry]


def _text_files(root: str) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in names if _is_text(name))


def _is_text(name: str) -> bool:
    stem = name.lower()
    for suffix in _COMPRESSED:
        stem = stem.removesuffix(suffix)
    return not name.startswith(".") and stem.endswith((*_JSON_SUFFIXES, *_TEXT_SUFFIXES))


def _open(source: Source) -> contextlib.AbstractContextManager[BinaryIO]:
    if source.path == STANDARD_INPUT:
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return open(source.path, "rb")
    except OSError as error:
        raise DataError(f"{source.path}: {error.strerror}; check --input") from error

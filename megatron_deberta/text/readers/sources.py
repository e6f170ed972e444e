"""Input files: paths are expanded, and the format of each file is determined."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from megatron_deberta.errors import ConfigError, DataError, MissingInputError
from megatron_deberta.files import did_you_mean, temporary_name
from megatron_deberta.parsing import read_json
from megatron_deberta.text.readers.compression import (
    COMPRESSED_SUFFIXES,
    Compression,
    TextStream,
    compression_of,
    window_fault,
)

# Documents of plain text: files, lines, or paragraphs separated by blank lines.
PlainFormat = Literal["file", "line", "paragraph"]
# JSONL has one object per line; Parquet and Arrow files are tables.
TextFormat = Literal["jsonl", "file", "line", "paragraph", "parquet", "arrow"]
FileFormat = Literal["auto", "jsonl", "text"]
TextMode = Literal["auto", "file", "line", "paragraph"]

STANDARD_INPUT = "-"
# Names in the folder of an unfinished run: of what decides its result, and of standard input.
PLAN = "plan.json"
SPOOLED_INPUT = "standard-input"
# Written by ``deduplicate`` and ``split`` into their output folder.
SUMMARY = "summary.json"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
TABLES = ("parquet", "arrow")
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_DELIMITED_SUFFIXES = (".csv", ".tsv")
_TEXT_SUFFIXES = (".txt", ".text")
_TABLE_SUFFIXES = (".parquet", ".arrow")
_JSON_BEGINNING = re.compile(rb"\{|\[\s*\{\s*\"")
_PARQUET_MAGIC = b"PAR1"
# Lists the files of a Hugging Face dataset that ``save_to_disk`` wrote.
_DATASET_STATE = "state.json"
# Lists the datasets, in folders beside it, that were saved together.
_DATASETS = "dataset_dict.json"
_UNFINISHED = ".unfinished"
_OF_SHARDS = (".manifest.json", ".quarantine.jsonl")
# ``deduplicate`` and ``split`` write them beside their text, ``part-*``.
_REPORTS = {SUMMARY, "quarantine.jsonl"}


@dataclass(frozen=True, slots=True)
class Source:
    """One input file.

    Attributes:
        path: file name.
        size_bytes: size on disk, before decompression.
        modified_ns: when it was last written, or what else tells it from another content.
        text_format: how records are told apart.
        compression: what is around them.
        label: what to call it, where not by its path.
    """

    path: str
    size_bytes: int
    modified_ns: int = 0
    text_format: TextFormat = "jsonl"
    compression: Compression = "none"
    label: str = ""

    @property
    def name(self) -> str:
        """What to call it in messages and in the quarantine."""
        return self.label or self.path


def find_sources(
    inputs: Sequence[str],
    *,
    file_format: FileFormat = "auto",
    text_mode: TextMode = "auto",
    spool: Path | None = None,
    output: Path | None = None,
) -> list[Source]:
    """Expand files, directories, globs and ``-``, and find out what each file is.

    Args:
        inputs: as given on the command line. Directories are searched for text files by suffix,
            hidden ones and what our own commands keep beside text left out; they and globs are
            sorted by name. A directory that holds a Hugging Face dataset stands for that dataset's
            files. A file named twice counts once.
        file_format: ``auto`` goes by the suffix, else by whether the text begins with ``{``;
            tables are known by their first bytes.
        text_mode: what a document is in plain text; ``auto``: each file that is found in a
            directory, each paragraph of a file that is named itself.
        spool: where standard input is kept, so that it can be cut and read again.
        output: folder that the command writes, left out of a directory that it is in.

    Raises:
        ConfigError: ``-`` is combined with files, or cannot be used here; or a file needs too much
            memory to decompress.
        DataError: something does not exist, cannot be opened, or holds no text file.
    """
    if STANDARD_INPUT in inputs:
        if len(inputs) > 1:
            raise ConfigError("--input -: standard input cannot be combined with files")
        if spool is None:
            raise ConfigError("--input -: this command needs files")
        spool, digest = _spool_standard_input(spool)
        plain = _plain_format(text_mode, is_found=False)
        source = _describe(str(spool), file_format, plain, "standard input")
        # What tells it from another input is not when it was kept.
        return [dataclasses.replace(source, modified_ns=digest)]
    unique: dict[str, tuple[str, PlainFormat]] = {}
    for path, is_found in (each for entry in inputs for each in _expand(entry, output)):
        # The name that was given stays: what a link leads to may have no suffix.
        plain = _plain_format(text_mode, is_found)
        unique.setdefault(os.path.realpath(path), (os.path.abspath(path), plain))
    return [_describe(path, file_format, plain) for path, plain in unique.values()]


def _plain_format(text_mode: TextMode, is_found: bool) -> PlainFormat:
    """Return what a document of plain text is; ``is_found`` tells that a directory was named."""
    if text_mode != "auto":
        return text_mode
    return "file" if is_found else "paragraph"


def _spool_standard_input(spool: Path) -> tuple[Path, int]:
    """Keep standard input in a file that is named by its content: another run may read another."""
    digest = hashlib.sha256()
    mine = temporary_name(spool)
    try:
        spool.parent.mkdir(parents=True, exist_ok=True)
        with mine.open("wb") as stream:
            while piece := sys.stdin.buffer.read(1 << 20):
                digest.update(piece)
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        final = spool.with_name(f"{spool.name}-{digest.hexdigest()[:16]}")
        os.replace(mine, final)
        return final, int.from_bytes(digest.digest()[:7], "big")
    except OSError as error:
        mine.unlink(missing_ok=True)
        raise DataError(
            f"{spool}: cannot keep standard input: {error}; is the disk full?"
        ) from error


def _describe(path: str, file_format: FileFormat, plain: PlainFormat, label: str = "") -> Source:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{path!a}: its name is not UTF-8; rename it") from error
    try:
        # Opening a pipe would wait for somebody to write.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise MissingInputError(
                f"{path}: not a regular file; pipe what it gives in with --input -"
            )
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            head = file.read(18)
            compression = compression_of(head)
            if fault := window_fault(head):
                raise ConfigError(f"{path}: {fault}")
            file.seek(0)
            return Source(
                path,
                status.st_size,
                status.st_mtime_ns,
                _table_format(path, head)
                or _format_by_suffix(path, file_format, plain)
                or _format_by_beginning(TextStream(file, path, compression), plain),
                compression,
                label,
            )
    except OSError as error:
        raise MissingInputError(
            f"{path}: {error.strerror}{did_you_mean(Path(path)) or '; check --input'}"
        ) from error


def _table_format(path: str, head: bytes) -> TextFormat | None:
    if head.startswith(_PARQUET_MAGIC):
        return "parquet"
    return "arrow" if path.lower().endswith(".arrow") else None


def _format_by_suffix(path: str, file_format: FileFormat, plain: PlainFormat) -> TextFormat | None:
    if file_format != "auto":
        return "jsonl" if file_format == "jsonl" else plain
    suffixes = [suffix.lower() for suffix in Path(path).suffixes[-2:]]
    suffix = next((each for each in reversed(suffixes) if each not in COMPRESSED_SUFFIXES), "")
    if suffix in _TEXT_SUFFIXES:
        return plain
    if suffix in _DELIMITED_SUFFIXES:
        raise ConfigError(
            f"{path}: is a table by its suffix, whose lines are not text; write it as JSON Lines "
            "or Parquet, or read its lines as they stand with --format text"
        )
    return "jsonl" if suffix in _JSON_SUFFIXES else None


def _format_by_beginning(text: TextStream, plain: PlainFormat) -> TextFormat:
    head = b""
    while len(head) <= len(BYTE_ORDER_MARK) and (piece := text.read1()):
        head = (head + piece).removeprefix(BYTE_ORDER_MARK).lstrip()
    # An array of objects is refused later, with what to do.
    return "jsonl" if _JSON_BEGINNING.match(head) else plain


def _expand(entry: str, output: Path | None) -> list[tuple[str, bool]]:
    """Return files, and with each whether it was found in a directory that was named."""
    if os.path.isdir(entry):
        found = sorted(_walk(entry, None if output is None else os.path.realpath(output)))
        if not found:
            known = ", ".join((*_JSON_SUFFIXES, *_TEXT_SUFFIXES))
            raise MissingInputError(
                f"--input {entry}: no file ending in {known} "
                f"({', '.join(COMPRESSED_SUFFIXES)}) or {', '.join(_TABLE_SUFFIXES)} in it"
            )
        return [(path, True) for path in found]
    if not os.path.lexists(entry) and glob.has_magic(entry):
        matches = sorted(glob.glob(entry, recursive=True))
        if not matches:
            raise MissingInputError(f"--input {entry}: matches no file")
        if "**" in entry:
            # The files of a folder are matched themselves.
            return [(path, False) for path in matches if os.path.isfile(path)]
        return [found for match in matches for found in _expand(match, output)]
    return [(entry, False)]


def _walk(root: str, output: str | None) -> Iterator[str]:
    # Links are followed, in a circle once.
    seen = {output, os.path.realpath(root)}
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable, followlinks=True):
        wanted = {
            os.path.realpath(os.path.join(folder, name)): name
            for name in sorted(folders, reverse=True)
            if not name.startswith(".") and not name.endswith(_UNFINISHED)
        }
        folders[:] = [name for path, name in wanted.items() if path not in seen]
        seen.update(wanted)
        if _DATASET_STATE in names:
            yield from _dataset_files(Path(folder))
        elif _DATASETS in names:
            continue
        elif _REPORTS <= set(names):
            yield from (os.path.join(folder, name) for name in names if name.startswith("part-"))
        else:
            yield from (os.path.join(folder, name) for name in names if _is_text(name))


def _raise_unreadable(error: OSError) -> None:
    raise MissingInputError(f"{error.filename}: {error.strerror}; check --input") from error


class _DatasetFile(TypedDict):
    filename: Annotated[str, Field(pattern=r"^[^/\x00]+$")]


class _DatasetState(TypedDict):
    """What is read from a saved dataset's ``state.json``."""

    _data_files: list[_DatasetFile]


def _dataset_files(folder: Path) -> list[str]:
    """Return a dataset's own files; what ``map`` cached beside them is not part of it."""
    try:
        state = read_json(
            folder / _DATASET_STATE, _DatasetState, "a Hugging Face dataset",
            remedy="save it again", ignore_unknown=True,
        )  # fmt: skip
    except OSError as error:
        raise DataError(f"{folder / _DATASET_STATE}: {error.strerror}; save it again") from error
    return [str(folder / entry["filename"]) for entry in state["_data_files"]]


def _is_text(name: str) -> bool:
    stem = name = name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        stem = stem.removesuffix(suffix)
    is_known = stem.endswith((*_JSON_SUFFIXES, *_TEXT_SUFFIXES)) or name.endswith(_TABLE_SUFFIXES)
    return is_known and not name.startswith(".") and not name.endswith(_OF_SHARDS)

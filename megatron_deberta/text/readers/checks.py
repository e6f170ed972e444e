"""Checks of the input before the work: keys, short documents, both sides of a split."""

from __future__ import annotations

import codecs
import contextlib
import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
from typing_extensions import TypedDict

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.parsing import parse_json
from megatron_deberta.text.readers.compression import TextStream
from megatron_deberta.text.readers.reading import DocumentReader, column_names
from megatron_deberta.text.readers.records import (
    DAMAGED,
    DEFAULT_ALLOW_BAD,
    EMPTY,
    ReadOptions,
    read_leniently,
)
from megatron_deberta.text.readers.sources import BYTE_ORDER_MARK, SUMMARY, TABLES, Source

logger = logging.getLogger(__name__)

# Folders that ``split`` writes.
SIDES = ("train", "validation")
_FILES = 8
_HEAD_BYTES = 1 << 16
# Share of zeros from which every second byte is not text.
_ZEROS = 0.3
_PAIRS = 8
_CONTAINERS = (
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"Rar!\x1a\x07", "a RAR archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"%PDF-", "a PDF file"),
)
"""Offset and content of what such files have near their beginning, after decompression."""
_RECORDS = 1000
_BYTES = 1 << 26
_FEW_DOCUMENTS = 20
# About 50 words.
_SHORT_CHARACTERS = 300
_NAMES = 3


def check_input(
    sources: Sequence[Source],
    options: ReadOptions,
    *,
    max_bad_fraction: float | None = None,
    warn_short: bool = True,
) -> None:
    """Look at the first records of a few files, evenly chosen.

    Args:
        sources: input files.
        options: what is read of them.
        max_bad_fraction: share of unusable records that the command accepts; files with a smaller
            share of the input may lack the keys. None: 0.1 %.
        warn_short: warn of short documents of plain text, which may be parts of documents.

    Raises:
        ConfigError: no record has text under a key, or a file is UTF-16 or other JSON than lines.
        DataError: a file cannot be read.
    """
    limit = DEFAULT_ALLOW_BAD if max_bad_fraction is None else max_bad_fraction
    total = sum(source.size_bytes for source in sources)
    lengths: list[int] = []
    for source in sources[:: max(1, len(sources) // _FILES)]:
        if source.text_format not in TABLES:
            _refuse_other_form(source)
        if source.text_format == "jsonl" and source.size_bytes > limit * total:
            _check_keys(source, options, _text_keys(source, options))
        elif source.text_format in TABLES and source.size_bytes > limit * total:
            _check_keys(source, options, column_names(source))
        elif source.text_format in ("line", "paragraph") and warn_short:
            lengths += _first_lengths(source, options)
    if len(lengths) >= _FEW_DOCUMENTS and statistics.median(lengths) < _SHORT_CHARACTERS:
        logger.warning(
            "warning: half of the documents are short, at most %d characters; if each file is one "
            "document, set --text-mode file",
            statistics.median(lengths),
        )


def find_both_sides(sources: Sequence[Source]) -> tuple[Path, Path] | None:
    """Return the folders of training and validation documents if the input has both of a split."""
    folders = {Path(source.path).parent for source in sources}
    for folder in sorted({path.parent for path in folders}):
        train, validation = (folder / side for side in SIDES)
        if {train, validation} <= folders and (folder / SUMMARY).is_file():
            return train, validation
    return None


def refuse_both_sides(sources: Sequence[Source], output: str) -> None:
    """Refuse to write training and validation documents of a split into one shard.

    Raises:
        ConfigError: the input holds both sides of a split.
    """
    if sides := find_both_sides(sources):
        train, validation = sides
        raise ConfigError(
            f"--input: {train} and {validation} are the two sides of a split and would become "
            f"one shard; run preprocess for each, with --input {train} --output "
            f"{output}_train and with --input {validation} --output {output}_validation"
        )


class _Quarantined(TypedDict):
    """What is read from a line of a quarantine list."""

    file: str
    reason: str


def name_damaged(quarantine: Path) -> str:
    """Return the names of damaged files in a list of quarantined records, at most the first few."""
    with quarantine.open("rb") as stream:
        entries = (
            parse_json(
                line, _Quarantined, quarantine, "a quarantined record", remedy="preprocess again",
                ignore_unknown=True,
            )
            for line in stream
        )  # fmt: skip
        names = sorted({entry["file"] for entry in entries if entry["reason"] == DAMAGED})
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


def refuse_bad(
    reasons: Mapping[str, int], records: int, allow_bad: float | None, listed: Path
) -> None:
    """Refuse a result with too many unusable records, before it is published.

    Args:
        reasons: number of unusable records by reason; empty ones are no fault.
        records: all of them.
        allow_bad: see ``RunOptions``.
        listed: list of the records that were left out.

    Raises:
        DataError: more than ``allow_bad`` are unusable, or a file is damaged and nothing was said.
    """
    bad = {reason: count for reason, count in sorted(reasons.items()) if reason != EMPTY}
    limit = DEFAULT_ALLOW_BAD if allow_bad is None else allow_bad
    damaged = bad.get(DAMAGED, 0)
    total = sum(bad.values())
    if total <= limit * records and not (damaged and allow_bad is None):
        return
    found = ", ".join(f"{count} {reason}" for reason, count in bad.items())
    names = f"; damaged: {name_damaged(listed)}" if damaged else ""
    raise DataError(
        f"{total} of {records} records are bad ({found}), {total / max(records, 1):.2%} where "
        f"--max-bad-fraction is {limit:.2%}{names}; they are listed in {listed}; nothing was "
        "published; mend the input, or run the command again with --max-bad-fraction FRACTION"
    )


def _refuse_other_form(source: Source) -> None:
    """Refuse what reading by lines of UTF-8 would list as thousands of unusable records.

    Raises:
        ConfigError: the file is an archive, UTF-16 or UTF-32, one JSON array, or JSON that does not
            have one object per line.
        DataError: it cannot be read.
    """
    try:
        file = open(source.path, "rb", buffering=0)
    except OSError as error:
        raise DataError(f"{source.path}: {error.strerror}; check --input") from error
    with TextStream(file, source.name, source.compression) as text:
        head = text.read(_HEAD_BYTES)
    for start, mark, kind in _CONTAINERS:
        if head.startswith(mark, start):
            raise ConfigError(
                f"{source.name}: is {kind}, and text is read; unpack it and give what is in it"
            )
    if encoding := _other_encoding(head):
        raise ConfigError(
            f"{source.name}: is {encoding}, and UTF-8 is read; convert it: iconv -f {encoding} -t "
            f"UTF-8 FILE > NEW"
        )
    if source.text_format != "jsonl":
        return
    head = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    line, _, rest = head.partition(b"\n")
    if head[:1] not in (b"[", b"{") or (_is_json(line) and (head[:1] == b"{" or rest.strip())):
        return
    if head[:1] == b"[":
        raise ConfigError(
            f"{source.name}: is one JSON array, and one JSON object per line is read; convert it: "
            "jq -c '.[]' FILE > NEW.jsonl"
        )
    # What follows may be damaged, or longer than what was read.
    if line.strip() == b"{" or (where := _first_object(head)):
        where = "span several lines" if line.strip() == b"{" else where
        raise ConfigError(
            f"{source.name}: its JSON objects {where}, and one per line is read; "
            "convert it: jq -c . FILE > NEW.jsonl"
        )


def _other_encoding(head: bytes) -> str:
    """Return the name of the encoding of a file that is not UTF-8; empty: it may be."""
    marks = {
        codecs.BOM_UTF32_LE: "UTF-32",
        codecs.BOM_UTF32_BE: "UTF-32",
        codecs.BOM_UTF16_LE: "UTF-16",
        codecs.BOM_UTF16_BE: "UTF-16",
    }
    for mark, name in marks.items():
        if head.startswith(mark):
            return name
    # Without a mark: half of the bytes of Latin text are zero.
    pairs = len(head) // 2
    for first, name in ((1, "UTF-16LE"), (0, "UTF-16BE")):
        if pairs >= _PAIRS and head[first::2].count(0) > _ZEROS * pairs > head[
            1 - first :: 2
        ].count(0):
            return name
    return ""


def _is_json(content: bytes) -> bool:
    try:
        orjson.loads(content)
    except orjson.JSONDecodeError:
        return False
    return True


def _first_object(content: bytes) -> str:
    """Say how the first JSON object differs from one per line; empty: otherwise."""
    text = content.decode("utf-8", "replace")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return ""
    if end > text.find("\n") > 0:
        return "span several lines"
    return "stand side by side in a line" if text[end:].lstrip().startswith("{") else ""


def _check_keys(source: Source, options: ReadOptions, present: Sequence[str] | None) -> None:
    missing = [key for key in options.keys if present is not None and key not in present]
    if missing:
        where = "column" if source.text_format in TABLES else "key with text in the first records"
        raise ConfigError(
            f"--keys {','.join(missing)}: no such {where} of {source.name}; choose from: "
            f"{', '.join(present or []) or '(none)'}"
        )


def _text_keys(source: Source, options: ReadOptions) -> list[str] | None:
    """Return the keys that hold text in the first records; None if any of those can be used."""
    keys: dict[str, None] = {}
    has_object = False
    num_records = num_bytes = 0
    with contextlib.closing(DocumentReader(source, options)) as reader:
        for batch in reader.read():
            if batch.documents:
                return None
            for _, _, content in batch.records:
                record = read_leniently(content)
                if isinstance(record, dict):
                    has_object = True
                    keys.update((k, None) for k, value in record.items() if type(value) is str)
            num_records += len(batch.defects)
            num_bytes += batch.text_bytes
            if num_records >= _RECORDS or num_bytes >= _BYTES:
                break
    return list(keys) if has_object else None


def _first_lengths(source: Source, options: ReadOptions) -> list[int]:
    """Return the characters of each of the first documents."""
    with contextlib.closing(DocumentReader(source, options)) as reader:
        batch = next(reader.read(), None)
    return [len(document.texts[0]) for document in batch.documents] if batch else []

"""Units of the input, and the documents of a unit, with the bytes that each has in its file."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson

from megatron_deberta.files import HashedFile
from megatron_deberta.text.readers.reading import ENDLESS, DocumentReader, count_groups
from megatron_deberta.text.readers.records import EMPTY, Defect, ReadOptions, RecordBatch
from megatron_deberta.text.readers.sources import TABLES, Source, TextFormat

UNIT_BYTES = 1 << 26
_LEAST_UNIT_BYTES = 1 << 23
_USUAL_UNITS = 256
# How much longer a text is than its compressed file; only the units' sizes depend on it.
_USUAL_RATIO = 4


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of one file: bytes of its text, or groups of its table.

    Attributes:
        source: index of the file.
        begin: first of the range.
        end: behind the last.
    """

    source: int
    begin: int = 0
    end: int = ENDLESS


class Unit(NamedTuple):
    """Part of the input that is worked on at a time, the same for any number of processes.

    Attributes:
        ranges: of its files; all of the only one that ``is_stream``.
        is_stream: the file can only be read from its beginning, and is larger than a unit should
            be.
        file_bytes: bytes on disk, for the progress display.
    """

    ranges: tuple[FileRange, ...]
    is_stream: bool
    file_bytes: int


class Record(NamedTuple):
    """A document that has words.

    Attributes:
        source: number of its file.
        line: its line there, or its row; in a file that is read from its middle counted from there.
        offset: byte offset of the line in the uncompressed file; -1 in a table.
        text: what is compared: the texts of all keys, one a line.
        content: one line of JSON, without the line's end; a JSON record stays as it was.
    """

    source: int
    line: int
    offset: int
    text: str
    content: bytes


def usual_unit_bytes(sources: Sequence[Source]) -> int:
    """Return a size of units that gives many processes work, and few a short list of units."""
    size = sum(source.size_bytes for source in sources)
    return min(max(size // _USUAL_UNITS, _LEAST_UNIT_BYTES), UNIT_BYTES)


def plan_units(sources: Sequence[Source], unit_bytes: int) -> list[Unit]:
    """Cut files into units of about ``unit_bytes`` of text; small files share one.

    Raises:
        DataError: a table is damaged, or pyarrow is missing.
    """
    units: list[Unit] = []
    ranges: list[FileRange] = []
    size = file_bytes = 0

    def close() -> None:
        nonlocal size, file_bytes
        if ranges:
            units.append(Unit(tuple(ranges), False, file_bytes))
        ranges.clear()
        size = file_bytes = 0

    for index, source in enumerate(sources):
        if _is_stream(source, unit_bytes):
            close()
            units.append(Unit((FileRange(index),), True, source.size_bytes))
            continue
        for file_range, range_bytes in _ranges(index, source, unit_bytes):
            if ranges and size + range_bytes > unit_bytes:
                close()
            ranges.append(file_range)
            size += range_bytes
            file_bytes += range_bytes if source.compression == "none" else source.size_bytes
    close()
    return units


def _is_stream(source: Source, unit_bytes: int) -> bool:
    if source.text_format in TABLES:
        return False
    if source.compression != "none":
        return source.size_bytes * _USUAL_RATIO > unit_bytes
    return source.text_format in ("file", "paragraph") and source.size_bytes > unit_bytes


def _ranges(index: int, source: Source, unit_bytes: int) -> list[tuple[FileRange, int]]:
    if source.text_format in TABLES:
        return _table_ranges(index, count_groups(source), unit_bytes)
    if source.compression != "none":
        return [(FileRange(index), source.size_bytes * _USUAL_RATIO)]
    if source.size_bytes <= unit_bytes:
        return [(FileRange(index), source.size_bytes)]
    return [
        (FileRange(index, begin, begin + unit_bytes), min(unit_bytes, source.size_bytes - begin))
        for begin in range(0, source.size_bytes, unit_bytes)
    ]


def _table_ranges(index: int, groups: list[int], unit_bytes: int) -> list[tuple[FileRange, int]]:
    """Put small row groups together: each range opens the file anew."""
    ranges: list[tuple[FileRange, int]] = []
    for group, size in enumerate(groups):
        if ranges and ranges[-1][1] + size <= unit_bytes:
            file_range, before = ranges.pop()
            ranges.append((FileRange(index, file_range.begin, group + 1), before + size))
        else:
            ranges.append((FileRange(index, group, group + 1), size))
    return ranges


@dataclass(slots=True)
class UnitReader:
    """Iterates over the documents of a unit that have words.

    Attributes:
        ranges: what to read.
        sources: files of the input.
        options: what is wanted of them.
        counts: what was read so far, see ``Counts``.
        quarantine: gets a line for each record that cannot be used.
        lines_before: line ends of each file before its range; None: they are unknown.
        line_ends: line ends of each file's range, once it has been read; tables have none.
        reasons: number of records that cannot be used, by reason.

    Raises:
        DataError: while reading: a file cannot be read.
    """

    ranges: Sequence[FileRange]
    sources: Sequence[Source]
    options: ReadOptions
    counts: Counter[str]
    quarantine: HashedFile | None = None
    lines_before: Mapping[str, int] | None = None
    line_ends: dict[int, int] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[Record]:
        """Read the unit through."""
        for each in self.ranges:
            source = self.sources[each.source]
            with contextlib.closing(DocumentReader(source, self.options)) as reader:
                for batch in reader.read(each.begin, each.end):
                    self.counts["text_bytes"] += batch.text_bytes
                    self.counts["documents"] += len(batch.documents)
                    self.counts["quarantined"] += len(batch.defects)
                    contents = self._contents(source.text_format, batch)
                    for (line, offset, texts), content in zip(
                        batch.documents, contents, strict=True
                    ):
                        text = "\n".join(texts)
                        if text.strip():
                            yield Record(each.source, line, offset, text, content)
                        else:
                            self._set_aside(each.source, Defect(line, offset, EMPTY, "no words"))
                    for defect in batch.defects:
                        self._set_aside(each.source, defect)
                if reader.records is not None:
                    self.line_ends[each.source] = reader.records.line - 1

    def _set_aside(self, source: int, defect: Defect) -> None:
        self.reasons[defect.reason] += 1
        if self.quarantine is not None:
            before = None
            if self.lines_before is not None:
                before = self.lines_before.get(str(source), 0)
            self.quarantine.write(defect.describe(self.sources[source].name, before))

    def _contents(self, text_format: TextFormat, batch: RecordBatch) -> Iterator[bytes]:
        if text_format == "jsonl":
            raw = {offset: content for _, offset, content in batch.records}
            return (raw[document.offset].strip() for document in batch.documents)
        # Plain text has one text for all keys.
        keys = self.options.keys if text_format in TABLES else self.options.keys[:1]
        return (orjson.dumps(dict(zip(keys, each.texts, strict=False))) for each in batch.documents)

"""Parts of the input that are worked on one at a time, and their records.

Owns the bytes of a record as they stood in its file, so that what is kept is kept as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from megatron_deberta.text.preprocess.units import UNIT_BYTES, Piece, plan_segments
from megatron_deberta.text.readers.cutting import RecordReader
from megatron_deberta.text.readers.reading import ReadOptions
from megatron_deberta.text.readers.records import Defect, parse_records
from megatron_deberta.text.readers.sources import TABLES, Source
from megatron_deberta.text.readers.tables import read_rows

WorkUnit = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """A document.

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


def plan_units(sources: Sequence[Source], unit_bytes: int = UNIT_BYTES) -> list[WorkUnit]:
    """Cut files that can be read from their middle, and put small ones together.

    Large compressed files and files of paragraphs are units of their own: what is kept of each
    record is written as it comes, so that a unit's size is no matter.
    """
    return [segment.pieces for segment in plan_segments(sources, unit_bytes)]


class UnitReader:
    """Iterates over a unit's records; those that cannot be used come as (file's number, defect).

    Args:
        unit: what to read.
        sources: files of the input.
        options: what is wanted of them.

    Attributes:
        line_ends: line ends of each file's piece, once it has been read; tables have none.

    Raises:
        DataError: while reading: a file cannot be read.
    """

    def __init__(self, unit: WorkUnit, sources: Sequence[Source], options: ReadOptions) -> None:
        """See the class."""
        self._unit = unit
        self._sources = sources
        self._options = options
        self.line_ends: dict[int, int] = {}

    def __iter__(self) -> Iterator[Record | tuple[int, Defect]]:
        """Read the unit through."""
        for piece in self._unit:
            source = self._sources[piece.source]
            is_table = source.text_format in TABLES
            yield from (self._read_table if is_table else self._read_text)(piece, source)

    def _read_text(self, piece: Piece, source: Source) -> Iterator[Record | tuple[int, Defect]]:
        options = self._options
        is_jsonl = source.text_format == "jsonl"
        reader = RecordReader(source, longest_bytes=options.longest_bytes)
        try:
            for block in reader.blocks(piece.begin, piece.end):
                documents, defects = parse_records(
                    block.records,
                    source.text_format,
                    options.keys,
                    normalization=options.normalization,
                )
                if block.defect is not None:
                    defects.append(block.defect)
                raw = {offset: content for _, offset, content in block.records if is_jsonl}
                for line, offset, texts in documents:
                    if is_jsonl:
                        content = raw[offset].strip()
                    else:
                        content = orjson.dumps({options.keys[0]: texts[0]})
                    yield Record(piece.source, line, offset, "\n".join(texts), content)
                yield from ((piece.source, defect) for defect in defects)
            self.line_ends[piece.source] = reader.line - 1
        finally:
            reader.close()

    def _read_table(self, piece: Piece, source: Source) -> Iterator[Record | tuple[int, Defect]]:
        options = self._options
        for documents, defects, _ in read_rows(
            source,
            piece.begin,
            piece.end,
            options.keys,
            normalization=options.normalization,
            longest_bytes=options.longest_bytes,
        ):
            for line, offset, texts in documents:
                content = orjson.dumps(dict(zip(options.keys, texts, strict=True)))
                yield Record(piece.source, line, offset, "\n".join(texts), content)
            yield from ((piece.source, defect) for defect in defects)

"""Parts of the input that are worked on one at a time, and their records.

Owns where a unit begins and ends, which depends on the files only, and the bytes of a record as
they stood in its file, so that what is kept is kept as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from megatron_deberta.preprocess.cutting import ENDLESS, RecordReader
from megatron_deberta.preprocess.reading import ReadOptions
from megatron_deberta.preprocess.records import Defect, parse_block
from megatron_deberta.preprocess.sources import BYTE_ORDER_MARK, TABLES, Source
from megatron_deberta.preprocess.tables import read_rows

UNIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one file's uncompressed bytes, or of a table's row groups.

    Attributes:
        source: number of the file.
        begin: first byte.
        end: byte behind the last; records belong to the range in which they begin.
    """

    source: int
    begin: int
    end: int


Unit = tuple[Piece, ...]


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


def plan_units(sources: Sequence[Source], unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Cut files that can be read from their middle, and put small ones together.

    Compressed files, tables and files of paragraphs are not cut: they are read from the front.
    """
    units: list[Unit] = []
    waiting: list[Piece] = []
    size = 0
    for number, source in enumerate(sources):
        can_seek = source.compression == "none" and source.text_format in ("jsonl", "line")
        ends = range(unit_bytes, source.size_bytes, unit_bytes) if can_seek else ()
        begin = 0
        for end in [*ends, ENDLESS]:
            waiting.append(Piece(number, begin, end))
            size += min(end, source.size_bytes) - begin
            begin = end
            if size >= unit_bytes:
                units.append(tuple(waiting))
                waiting, size = [], 0
    return [*units, tuple(waiting)] if waiting else units


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

    def __init__(self, unit: Unit, sources: Sequence[Source], options: ReadOptions) -> None:
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
                documents, defects = parse_block(
                    block,
                    source.text_format,
                    options.keys,
                    normalization=options.normalization,
                    longest_bytes=options.longest_bytes,
                )
                for line, offset, texts in documents:
                    if is_jsonl:
                        begin = offset - block.offset_bytes
                        end = block.content.find(b"\n", begin)
                        content = block.content[begin : end if end >= 0 else None].strip()
                        content = content.removeprefix(BYTE_ORDER_MARK)
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

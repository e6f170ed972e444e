"""Units of the input and their records, with the bytes that a record has in its file."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson

from megatron_deberta.text.preprocess.units import UNIT_BYTES, Piece, plan_segments
from megatron_deberta.text.readers.reading import DocumentReader
from megatron_deberta.text.readers.records import EMPTY, Defect, ReadOptions, RecordBatch
from megatron_deberta.text.readers.sources import TABLES, Source, TextFormat

WorkUnit = tuple[Piece, ...]


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


def plan_units(sources: Sequence[Source], unit_bytes: int = UNIT_BYTES) -> list[WorkUnit]:
    """Cut files that can be read from their middle, and put small ones together.

    Large compressed files and files of paragraphs are units of their own: what is kept of each
    record is written as it comes, so that a unit's size is no matter.
    """
    return [segment.pieces for segment in plan_segments(sources, unit_bytes)]


@dataclass(frozen=True, slots=True)
class UnitReader:
    """Iterates over a unit's records; those that cannot be used come as (file's number, defect).

    Attributes:
        unit: what to read.
        sources: files of the input.
        options: what is wanted of them.
        line_ends: line ends of each file's piece, once it has been read; tables have none.
        counts: what was read so far, see ``Counts``.

    Raises:
        DataError: while reading: a file cannot be read.
    """

    unit: WorkUnit
    sources: Sequence[Source]
    options: ReadOptions
    line_ends: dict[int, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[Record | tuple[int, Defect]]:
        """Read the unit through."""
        for piece in self.unit:
            source = self.sources[piece.source]
            with contextlib.closing(DocumentReader(source, self.options)) as reader:
                for batch in reader.read(piece.begin, piece.end):
                    self.counts["text_bytes"] += batch.text_bytes
                    self.counts["documents"] += len(batch.documents)
                    self.counts["quarantined"] += len(batch.defects)
                    contents = self._contents(source.text_format, batch)
                    for (line, offset, texts), content in zip(
                        batch.documents, contents, strict=True
                    ):
                        text = "\n".join(texts)
                        if text.strip():
                            yield Record(piece.source, line, offset, text, content)
                        else:
                            yield piece.source, Defect(line, offset, EMPTY, "no words")
                    yield from ((piece.source, defect) for defect in batch.defects)
                if reader.records is not None:
                    self.line_ends[piece.source] = reader.records.line - 1

    def _contents(self, text_format: TextFormat, batch: RecordBatch) -> Iterator[bytes]:
        if text_format == "jsonl":
            raw = {offset: content for _, offset, content in batch.records}
            return (raw[document.offset].strip() for document in batch.documents)
        # Plain text has one text for all keys.
        keys = self.options.keys if text_format in TABLES else self.options.keys[:1]
        return (orjson.dumps(dict(zip(keys, each.texts, strict=False))) for each in batch.documents)

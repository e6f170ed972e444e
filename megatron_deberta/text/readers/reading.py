"""Documents and defects of any input file, whole or in ranges, in bounded memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from megatron_deberta.text.readers import records
from megatron_deberta.text.readers.cutting import ENDLESS, RecordReader
from megatron_deberta.text.readers.records import Defect, Document, ReadOptions, RecordBatch
from megatron_deberta.text.readers.sources import TABLES, Source
from megatron_deberta.text.readers.tables import read_rows

# Counted up when the same file gives other records or offsets: no unfinished run goes on then.
READING_VERSION = 3


def plan_input(sources: Sequence[Source], options: ReadOptions) -> dict[str, Any]:
    """Return what decides the documents, by option name; see ``JobFolder.begin``."""
    return {
        "--input": [list(astuple(source)) for source in sources],
        "--keys": list(options.keys),
        "--normalize": options.normalization,
        "--max-document-mb (in bytes)": options.longest_bytes,
        "version of reading": READING_VERSION,
    }


def planned_input(plan: Mapping[str, Any]) -> tuple[list[Source], ReadOptions]:
    """Return the sources and options that a plan of ``plan_input`` records."""
    return [Source(*source) for source in plan["--input"]], ReadOptions(
        keys=tuple(plan["--keys"]),
        normalization=plan["--normalize"],
        longest_bytes=plan["--max-document-mb (in bytes)"],
    )


class DocumentReader:
    """Reads one file, range after range; going on where it stands costs nothing.

    Ranges are of bytes of the uncompressed text, or of row groups in a table.

    Args:
        source: what to read.
        options: what is wanted of it.

    Attributes:
        records: the position in a file of text; None for a table.
    """

    def __init__(self, source: Source, options: ReadOptions) -> None:
        """See the class."""
        self.source = source
        self._options = options
        self.records: RecordReader | None = None
        if source.text_format not in TABLES:
            self.records = RecordReader(source, longest_bytes=options.longest_bytes)

    def read(self, begin: int = 0, end: int = ENDLESS) -> Iterator[RecordBatch]:
        """Read the records that begin in a range.

        Raises:
            DataError: the file cannot be read.
        """
        if self.records is None:
            yield from read_rows(self.source, begin, end, self._options)
            return
        for block in self.records.blocks(begin, end):
            documents, defects = records.parse_records(
                block.records, self.source.text_format, self._options
            )
            if block.defect is not None:
                defects.append(block.defect)
            yield RecordBatch(documents, defects, block.size_bytes, block.records)

    def close(self) -> None:
        """Close the file."""
        if self.records is not None:
            self.records.close()


def read_documents(
    sources: Iterable[Source], options: ReadOptions
) -> Iterator[tuple[Source, Document | Defect]]:
    """Read files one after the other; documents of a block come before its defects.

    Raises:
        DataError: a file cannot be read.
    """
    for source in sources:
        with contextlib.closing(DocumentReader(source, options)) as reader:
            for batch in reader.read():
                yield from ((source, document) for document in batch.documents)
                yield from ((source, defect) for defect in batch.defects)

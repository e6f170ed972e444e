"""Documents and defects out of any input file, whole or in ranges, in bounded memory.

Owns the one way by which commands read text. Refuses to decide what a defect means: preprocessing
sets it aside, learning a vocabulary does without a few.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

from megatron_deberta.errors import DataError
from megatron_deberta.text.readers import records
from megatron_deberta.text.readers.cutting import ENDLESS, RecordReader
from megatron_deberta.text.readers.records import Defect, Document, ReadOptions, RecordBatch
from megatron_deberta.text.readers.sources import TABLES, Source
from megatron_deberta.text.readers.tables import read_rows

logger = logging.getLogger(__name__)

# Counted up when the same file gives other records or offsets: no unfinished run goes on then.
READING_VERSION = 2
_WARNINGS = 5


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


def read_texts(sources: Iterable[Source], options: ReadOptions) -> Iterator[tuple[str, ...]]:
    """Read the texts of files, one tuple a document with one text a key.

    A record that cannot be used is logged and left out.

    Raises:
        DataError: a file cannot be read or is damaged, or, at the end, more than 0.1 % of the
            records cannot be used.
    """
    count, bad, first = 0, 0, ""
    for source, record in read_documents(sources, options):
        count += 1
        if not isinstance(record, Defect):
            yield record.texts
            continue
        bad += 1
        hint = "; set --keys" if record.reason == "missing key" else ""
        message = f"{source.name}: line {record.line}: {record.reason}: {record.detail}{hint}"
        if record.reason == records.DAMAGED:
            raise DataError(message)
        first = first or message
        if bad <= _WARNINGS:
            logger.warning("%s; left out", message)
    if bad > _WARNINGS:
        logger.warning("%d more records that cannot be used; left out", bad - _WARNINGS)
    if bad > count * records.DEFAULT_ALLOW_BAD:
        raise DataError(
            f"{bad} of {count} records cannot be used, more than {records.DEFAULT_ALLOW_BAD:.1%}; "
            f"the first: {first}"
        )

"""Documents and defects out of any input file, whole or in ranges, in bounded memory.

Owns the one way by which commands read text. Refuses to decide what a defect means: preprocessing
sets it aside, learning a vocabulary does without a few.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_deberta.errors import DataError
from megatron_deberta.text.readers.cutting import ENDLESS, RecordReader
from megatron_deberta.text.readers.records import (
    DAMAGED,
    DEFAULT_ALLOW_BAD,
    Defect,
    Document,
    Normalization,
    parse_records,
)
from megatron_deberta.text.readers.sources import TABLES, Source
from megatron_deberta.text.readers.tables import read_rows

logger = logging.getLogger(__name__)

READING_VERSION = 2
"""Counted up when the same file gives other records or offsets: no unfinished run goes on then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """What of a record is wanted.

    Attributes:
        keys: JSON keys or columns that hold text; plain text has one text for all of them.
        normalization: Unicode form that texts are brought to.
        longest_bytes: records of this size and more are defects.
    """

    keys: tuple[str, ...] = ("text",)
    normalization: Normalization = "none"
    longest_bytes: int = 100_000_000


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Some records of one file.

    Attributes:
        documents: those that can be used, in order.
        defects: those that cannot, in order.
        text_bytes: bytes they take in the uncompressed file.
    """

    documents: list[Document]
    defects: list[Defect]
    text_bytes: int


class DocumentReader:
    """Reads one file, range after range; going on where it stands costs nothing.

    Ranges are of bytes of the uncompressed text, or of row groups in a table.

    Args:
        source: what to read.
        options: what is wanted of it.
    """

    def __init__(self, source: Source, options: ReadOptions) -> None:
        """See the class."""
        self.source = source
        self._options = options
        is_table = source.text_format in TABLES
        self._records = (
            None if is_table else RecordReader(source, longest_bytes=options.longest_bytes)
        )

    def read(self, begin: int = 0, end: int = ENDLESS) -> Iterator[RecordBatch]:
        """Read the records that begin in a range.

        Raises:
            DataError: the file cannot be read.
        """
        options = self._options
        if self._records is None:
            for documents, defects, size in read_rows(
                self.source,
                begin,
                end,
                options.keys,
                normalization=options.normalization,
                longest_bytes=options.longest_bytes,
            ):
                yield RecordBatch(documents, defects, size)
            return
        for block in self._records.blocks(begin, end):
            documents, defects = parse_records(
                block.records,
                self.source.text_format,
                options.keys,
                normalization=options.normalization,
            )
            if block.defect is not None:
                defects.append(block.defect)
            yield RecordBatch(documents, defects, block.size_bytes)

    @property
    def records(self) -> RecordReader | None:
        """The position in a file of text; None for a table."""
        return self._records

    def close(self) -> None:
        """Close the file."""
        if self._records is not None:
            self._records.close()


def read_documents(
    sources: Iterable[Source], options: ReadOptions
) -> Iterator[tuple[Source, Document | Defect]]:
    """Read files one after the other; documents of a block come before its defects.

    Raises:
        DataError: a file cannot be read.
    """
    for source in sources:
        reader = DocumentReader(source, options)
        try:
            for batch in reader.read():
                for document in batch.documents:
                    yield source, document
                for defect in batch.defects:
                    yield source, defect
        finally:
            reader.close()


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
        if record.reason == DAMAGED:
            raise DataError(message)
        first = first or message
        logger.warning("%s; left out", message)
    if bad > count * DEFAULT_ALLOW_BAD:
        raise DataError(
            f"{bad} of {count} records cannot be used, more than {DEFAULT_ALLOW_BAD:.1%}; the "
            f"first: {first}"
        )

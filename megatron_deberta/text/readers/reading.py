"""Documents and defects of files of text and of tables, whole or in ranges, in bounded memory.

A file of text is read in ranges of bytes of the uncompressed text, and a record belongs to the
range of its first byte; memory is bounded by the longest record allowed. A table (Parquet, or Arrow
as Hugging Face datasets) is read in ranges of row groups, a few hundred rows at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

from megatron_deberta.errors import DataError
from megatron_deberta.text.readers.compression import TextStream
from megatron_deberta.text.readers.records import (
    DAMAGED,
    LONG,
    NO_KEY,
    NOT_TEXT,
    Defect,
    Document,
    ReadOptions,
    Record,
    RecordBatch,
    UnusableError,
    decode_text,
    finish_texts,
    kind_of,
    parse_records,
)
from megatron_deberta.text.readers.sources import BYTE_ORDER_MARK, TABLES, Source

# Counted up when the same file gives other records or offsets: no unfinished run goes on then.
READING_VERSION = 3
_BLANKS = b" \t\r\n"
# Of a line that nobody wants, read at a time.
_SKIPPED_BYTES = 1 << 16
ENDLESS = 1 << 62
_BATCH_ROWS = 256
_ABSENT = object()


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
            documents, defects = parse_records(
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


class TextBlock(NamedTuple):
    """Some records that follow one another.

    Attributes:
        records: those that are whole, blank ones too.
        defect: what is behind them and is no record: too long, or lost to damage.
        size_bytes: bytes they stand for.
    """

    records: list[Record]
    defect: Defect | None
    size_bytes: int


class RecordReader:
    """Reads the records of one file, range after range; going on where it stands costs nothing.

    Args:
        source: file of lines or paragraphs.
        block_bytes: a block ends behind the record with which it has this size.
        longest_bytes: records of this size and more are passed over.

    Attributes:
        can_seek: reading can begin anywhere, and lines are counted from there.
        line: number of the next record's first line.
        offset: where the next record begins in the uncompressed file.
        at_end: the file has no more records.
    """

    def __init__(
        self, source: Source, *, block_bytes: int = 1 << 18, longest_bytes: int = 100_000_000
    ) -> None:
        """See the class."""
        self._source = source
        self._block_bytes = block_bytes
        self._longest = longest_bytes
        readers = {"paragraph": self._read_paragraphs, "file": self._read_file}
        self._read_block = readers.get(source.text_format, self._read_lines)
        self.can_seek = source.text_format not in readers and source.compression == "none"
        self._stream: TextStream | None = None
        self._file_bytes_before = 0
        self._passed = 0
        self._rewind(0)

    @property
    def file_bytes(self) -> int:
        """Bytes of the file read so far, each time it was opened."""
        return self._file_bytes_before + (self._stream.file_bytes if self._stream else 0)

    def blocks(self, begin: int, end: int = ENDLESS) -> Iterator[TextBlock]:
        """Read the records that begin in ``[begin, end)``, offsets into the uncompressed text.

        Raises:
            DataError: the file cannot be read, or is not the one that was found.
        """
        self.go_to(begin)
        yield from self._blocks(end)

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._file_bytes_before += self._stream.file_bytes
            self._stream.close()
            self._stream = None

    def go_to(self, begin: int) -> None:
        """Pass over the records that begin before an offset.

        Raises:
            DataError: the file cannot be read, or is not the one that was found.
        """
        if self._passed <= begin <= self.offset:
            pass  # the next record is the first from there
        elif self.can_seek and begin:
            # The byte before tells whether a record begins here; its rest is another range's.
            self._rewind(begin - 1)
            self.offset += self._whole_size(self._next_line(_SKIPPED_BYTES))[0]
            self._passed = begin
        else:
            if begin < self._passed:
                self._rewind(0)
            for _ in self._blocks(begin):
                pass
        if self.can_seek:
            self.line = 1

    def _rewind(self, offset: int) -> None:
        self.close()
        self.offset, self.line = offset, 1
        self._passed = offset
        self.at_end = False
        self._ahead = b""

    @property
    def _text(self) -> TextStream:
        if self._stream is None:
            source = self._source
            try:
                file = open(source.path, "rb", buffering=0)
                status = os.fstat(file.fileno())
                file.seek(self.offset if self.can_seek else 0)
            except OSError as error:
                raise DataError(f"{source.path}: {error.strerror}; check --input") from error
            self._refuse_changed(status)
            self._stream = TextStream(file, source.name, source.compression)
        return self._stream

    def _refuse_changed(self, status: os.stat_result) -> None:
        source = self._source
        # What is kept of standard input is not told by its time.
        is_older = source.label or status.st_mtime_ns == source.modified_ns
        if source.modified_ns and not (status.st_size == source.size_bytes and is_older):
            raise DataError(f"{source.path}: changed while it was read; begin again")

    def _blocks(self, end: int) -> Iterator[TextBlock]:
        self._passed = ENDLESS
        while not self.at_end and self.offset < end:
            block = self._read_block(min(end, self.offset + self._block_bytes))
            if block.size_bytes or block.defect:
                yield block
        self._passed = end

    def _next_line(self, size: int) -> bytes:
        """Return what was read ahead, or the next line or its first ``size`` bytes."""
        line, self._ahead = self._ahead, b""
        if line:
            return line
        line = self._text.readline(size)
        if self.offset == 0 and line.startswith(BYTE_ORDER_MARK):
            self.offset = len(BYTE_ORDER_MARK)
            line = line[self.offset :]
            if not line.endswith(b"\n"):
                line += self._text.readline(self.offset)
        return line

    def _whole_size(self, line: bytes) -> tuple[int, bool]:
        """Pass over the rest of a line; return the size of all of it, and whether it ends."""
        size = len(line)
        while line and not line.endswith(b"\n"):
            line = self._text.readline(_SKIPPED_BYTES)
            size += len(line)
        return size, bool(line)

    def _read_lines(self, stop: int) -> TextBlock:
        records: list[Record] = []
        begin, longest = self.offset, self._longest
        content = self._next_line(longest + 1)
        offset, line, readline = self.offset, self.line, self._text.readline
        while content:
            size = len(content)
            if size >= longest and size - content.endswith(b"\n") >= longest:
                break
            records.append((line, offset, content))
            offset += size
            line += 1
            content = readline(longest + 1) if offset < stop else b""
        self.offset, self.line = offset, line
        defect = None
        is_unended = bool(records) and not records[-1][2].endswith(b"\n")
        if content:
            size, is_ended = self._whole_size(content)
            self.offset += size
            self.line += is_ended
            defect = Defect(line, offset, LONG, f"{size - is_ended} bytes")
        elif offset < stop or is_unended:
            if is_unended and self._text.damage:
                line, offset, _ = records.pop()
            defect = self._end(line, offset)
        return TextBlock(records, defect, self.offset - begin)

    def _read_file(self, stop: int) -> TextBlock:
        """Read the whole file as one record."""
        begin = self.offset
        content = self._next_line(self._longest + 1)
        line, offset = self.line, self.offset
        content += self._text.read(self._longest + 1 - len(content))
        size = len(content)
        while rest := self._text.read(_SKIPPED_BYTES):
            size += len(rest)
        self.offset += size
        self.line += content.count(b"\n")
        defect = self._end(line, offset)
        if defect is None and size >= self._longest:
            detail = f"{size} bytes; --text-mode paragraph makes each paragraph a document"
            defect = Defect(line, offset, LONG, detail)
        records = [(line, offset, content)] if content and defect is None else []
        return TextBlock(records, defect, self.offset - begin)

    def _read_paragraphs(self, stop: int) -> TextBlock:
        records: list[Record] = []
        defect = None
        begin = self.offset
        self._pass_blanks()
        while defect is None and not self.at_end and (self.offset < stop or not self._ahead):
            line, offset = self.line, self.offset
            found = self._next_paragraph() if self._ahead else None
            if found is None:
                defect = self._end(line, offset)
            elif isinstance(found, Defect):
                defect = found
            else:
                records.append(found)
        return TextBlock(records, defect, self.offset - begin)

    def _next_paragraph(self) -> Record | Defect | None:
        """Read a paragraph and the blank lines behind it; None where damage cuts it off."""
        line, offset, size = self.line, self.offset, 0
        longest, readline = self._longest, self._text.readline
        lines: list[bytes] = []
        content = self._ahead
        # Only what may be blank is worth a call.
        while content and not (content.isspace() and self._is_blank(content)):
            length, is_ended = len(content), content.endswith(b"\n")
            if not is_ended:
                length, is_ended = self._whole_size(content)
            if size <= longest:
                lines.append(content)
            size += length
            self.line += is_ended
            content = readline(longest + 1)
        self.offset += size
        is_whole = bool(content)
        self._ahead = content
        self._pass_blanks()
        size -= is_ended
        if size >= longest:
            return Defect(line, offset, LONG, f"{size} bytes")
        if self._text.damage and not is_whole:
            return None
        return line, offset, b"".join(lines)

    def _pass_blanks(self) -> None:
        """Go to the next line that is not blank, and read it ahead."""
        while (line := self._next_line(self._longest + 1)) and self._is_blank(line):
            self.offset += len(line)
            self.line += 1
        self._ahead = line

    def _is_blank(self, line: bytes) -> bool:
        # What looks blank may be the beginning of a line that is not.
        return line.isspace() and not line.strip(_BLANKS) and len(line) <= self._longest

    def _end(self, line: int, offset: int) -> Defect | None:
        """Close the file; where it is damaged, what is left from a place on is no record."""
        damage = self._text.damage
        try:
            self._refuse_changed(os.stat(self._source.path))
        except OSError as error:
            raise DataError(f"{self._source.path}: {error.strerror} while it was read") from error
        self.at_end = True
        self.close()
        return Defect(line, offset, DAMAGED, damage) if damage else None


def count_groups(source: Source) -> list[int]:
    """Return the bytes of each row group (Parquet) or record batch (Arrow), uncompressed.

    Raises:
        DataError: the file is damaged, or pyarrow is missing.
    """
    with _opened(source) as table:
        if source.text_format == "parquet":
            groups = range(table.metadata.num_row_groups)
            return [table.metadata.row_group(group).total_byte_size for group in groups]
        return [batch.nbytes for batch in table]


def column_names(source: Source) -> list[str] | None:
    """Return the names of a table's columns; None for a file without any batch.

    Raises:
        DataError: the file is damaged, or pyarrow is missing.
    """
    with _opened(source) as table:
        if source.text_format == "parquet":
            return list(table.schema_arrow.names)
        return next((list(batch.schema.names) for batch in table), None)


def read_rows(source: Source, begin: int, end: int, options: ReadOptions) -> Iterator[RecordBatch]:
    """Read the rows of the row groups ``[begin, end)``.

    Args:
        source: the file.
        begin: first row group.
        end: one past the last.
        options: how documents are read.

    Yields:
        A few hundred rows; ``line`` is the row of the file, from 1.

    Raises:
        DataError: the file is damaged, or pyarrow is missing.
    """
    for row, batch in _batches(source, begin, end, options.keys):
        documents: list[Document] = []
        defects: list[Defect] = []
        size = 0
        for line, values in enumerate(_values(batch, options.keys), row + 1):
            size += sum(len(value) for value in values if isinstance(value, bytes))
            try:
                documents.append(Document(line, -1, _texts_of(values, options)))
            except UnusableError as error:
                defects.append(Defect(line, -1, *error.args))
        yield RecordBatch(documents, defects, size)


def _batches(
    source: Source, begin: int, end: int, keys: Sequence[str]
) -> Iterator[tuple[int, Any]]:
    with _opened(source) as table:
        row = 0
        if source.text_format == "parquet":
            groups = range(begin, min(end, table.metadata.num_row_groups))
            row = sum(table.metadata.row_group(group).num_rows for group in range(begin))
            _refuse_ambiguous(source, table.schema_arrow.names, keys)
            present = [key for key in keys if key in table.schema_arrow.names]
            for batch in table.iter_batches(_BATCH_ROWS, groups, present, use_threads=False):
                _check_columns(batch, keys)
                yield row, batch
                row += batch.num_rows
            return
        for index, batch in enumerate(table):
            _refuse_ambiguous(source, batch.schema.names, keys)
            if begin <= index < end:
                _check_columns(batch, keys)
                for first in range(0, batch.num_rows, _BATCH_ROWS):
                    yield row + first, batch.slice(first, _BATCH_ROWS)
            row += batch.num_rows


def _check_columns(batch: Any, keys: Sequence[str]) -> None:
    """Check that the offsets and indices of columns are inside what they refer to.

    Those of a damaged file would end the process. Whether text is UTF-8 is seen row by row.

    Raises:
        pyarrow.ArrowException: they are not.
    """
    import pyarrow

    as_bytes = {
        pyarrow.string(): pyarrow.binary(),
        pyarrow.large_string(): pyarrow.large_binary(),
        pyarrow.string_view(): pyarrow.binary_view(),
    }
    for key in keys:
        if key in batch.schema.names:
            column = batch.column(key)
            if column.type in as_bytes:
                column = column.view(as_bytes[column.type])
            column.validate(full=True)


def _refuse_ambiguous(source: Source, columns: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if columns.count(key) > 1:
            raise DataError(f"{source.name}: {columns.count(key)} columns are named {key!r}")


def _values(batch: Any, keys: Sequence[str]) -> Iterator[tuple[object, ...]]:
    """Give each row's values, text as bytes; a missing column gives the key's absence."""
    import pyarrow

    types = pyarrow.types
    columns = []
    for key in keys:
        if key not in batch.schema.names:
            columns.append([_ABSENT] * batch.num_rows)
            continue
        column = batch.column(key)
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        kinds = (types.is_string, types.is_large_string, types.is_string_view)
        if any(is_kind(column.type) for is_kind in kinds):
            column = column.cast(pyarrow.large_binary())
        columns.append(column.to_pylist())
    return zip(*columns, strict=True)


def _texts_of(values: tuple[object, ...], options: ReadOptions) -> tuple[str, ...]:
    texts = []
    for key, value in zip(options.keys, values, strict=True):
        if value is _ABSENT:
            raise UnusableError(NO_KEY, f"no column {key!r}")
        if not isinstance(value, bytes):
            raise UnusableError(NOT_TEXT, f"column {key!r} is {kind_of(value)}")
        if len(value) >= options.longest_bytes:
            raise UnusableError(LONG, f"{len(value)} bytes")
        texts.append(decode_text(value, -1))
    return finish_texts(tuple(texts), options)


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{source.name}: reading {source.text_format} needs pyarrow; pip install pyarrow"
        ) from error
    try:
        if source.text_format == "parquet":
            with pyarrow.parquet.ParquetFile(source.path, memory_map=True) as table:
                yield table
            return
        with pyarrow.memory_map(source.path) as content:
            yield _arrow_batches(pyarrow, content)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise DataError(f"{source.name}: damaged {source.text_format} file ({problem})") from error


def _arrow_batches(pyarrow: Any, content: Any) -> Any:
    """Yield the batches of either of Arrow's formats; datasets are in the one without a footer."""
    if content.read(6) == b"ARROW1":
        reader = pyarrow.ipc.open_file(content)
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        content.seek(0)
        batches = pyarrow.ipc.open_stream(content)
    for batch in batches:
        # Buffers of a damaged file may be smaller than their batch.
        batch.validate()
        yield batch

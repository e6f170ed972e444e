"""Documents of Parquet files and Arrow files (Hugging Face datasets), in batches of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_deberta.errors import DataError
from megatron_deberta.text.readers import records
from megatron_deberta.text.readers.records import Defect, Document, ReadOptions, RecordBatch
from megatron_deberta.text.readers.sources import Source

_BATCH_ROWS = 256


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
            texts = _texts_of(values, options)
            if isinstance(texts, tuple):
                documents.append(Document(line, -1, texts))
            else:
                defects.append(Defect(line, -1, *texts.split(": ", 1)))
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
                yield row, batch
                row += batch.num_rows
            return
        for index, batch in enumerate(table):
            _refuse_ambiguous(source, batch.schema.names, keys)
            if begin <= index < end:
                for first in range(0, batch.num_rows, _BATCH_ROWS):
                    yield row + first, batch.slice(first, _BATCH_ROWS)
            row += batch.num_rows


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


_ABSENT = object()


def _texts_of(values: tuple[object, ...], options: ReadOptions) -> tuple[str, ...] | str:
    texts = []
    for key, value in zip(options.keys, values, strict=True):
        if value is _ABSENT:
            return f"{records.NO_KEY}: no column {key!r}"
        if not isinstance(value, bytes):
            return f"{records.NOT_TEXT}: column {key!r} is {records.kind_of(value)}"
        if len(value) >= options.longest_bytes:
            return f"{records.LONG}: {len(value)} bytes"
        text = records.decode_text(value)
        if isinstance(text, UnicodeDecodeError):
            return records.describe_bad_utf8(text, -1)
        texts.append(text)
    return records.finish_texts(tuple(texts), options)


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
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{source.name}: damaged {source.text_format} file ({error})") from error


def _arrow_batches(pyarrow: Any, content: Any) -> Any:
    """Open either of Arrow's formats; datasets are kept in the one without a footer."""
    if content.read(6) == b"ARROW1":
        reader = pyarrow.ipc.open_file(content)
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    content.seek(0)
    return pyarrow.ipc.open_stream(content)

"""Tables: TSV, CSV, JSON Lines, Parquet, and folders of ``datasets.save_to_disk``."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from megatron_deberta.errors import MalformedInputError
from megatron_deberta.tasks.readers.records import (
    Place,
    Record,
    kind_of,
    list_of,
    numbered_lines,
    read_text,
    require_below,
    require_regular,
    string_of,
)

logger = logging.getLogger(__name__)

_MOST_CHARACTERS = (1 << 31) - 1
"""Characters of a field, as a C ``long`` holds them on every platform."""
_LONE_SURROGATE = re.compile(
    r"(?<!\\)(?:\\\\)*(?:\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]..)"
)
"""Half of a pair of escapes, which Python's JSON reader accepts and UTF-8 has no form for."""


def read_delimited(
    path: Path, delimiter: str, *, header: bool, quoting: bool, skip_short_rows: bool
) -> Iterator[Record]:
    """Read a TSV or CSV file; without a header, columns are named 1, 2, ...

    Args:
        path: the file.
        delimiter: a tab or a comma.
        header: whether the first line names the columns.
        quoting: whether quotation marks delimit fields; False: they are text.
        skip_short_rows: skip rows with too few columns.

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    rows = _rows(path, delimiter, quoting)
    number, first = next((number, row) for number, row in rows if row)
    names = first if header else [str(column) for column in range(1, len(first) + 1)]
    for name, count in Counter(names).items():
        if count > 1:
            Place(path, number).fail(f"{count} columns are named {name!r}")
    if not header:
        yield Record(Place(path, number), dict(zip(names, first, strict=True)))
    blank = 0
    for number, row in rows:
        if not row:
            blank = blank or number
            continue
        if blank and len(names) == 1:
            # Not at the end: predictions would not stand in the lines of their texts.
            Place(path, blank).fail(f"the line is blank, but column {names[0]!r} needs a value")
        if len(row) < len(names) and skip_short_rows:
            continue
        if len(row) != len(names):
            Place(path, number).fail(f"{len(row)} columns instead of {len(names)}")
        yield Record(Place(path, number), dict(zip(names, row, strict=True)))


def _rows(path: Path, delimiter: str, quoting: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield line and columns of each row; blank lines have no columns."""
    text = read_text(path)
    if not quoting:
        for number, line in numbered_lines(text):
            yield number, line.split(delimiter) if line else []
        return
    # The module's own limit of 131,072 characters per field is for all of its users.
    csv.field_size_limit(_MOST_CHARACTERS)
    seen: list[str] = []

    def lines() -> Iterator[str]:
        for line in io.StringIO(text, newline=""):
            seen.append(line)
            yield line

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    number, is_tsv = 1, delimiter == "\t"
    merged = 0
    try:
        for row in reader:
            if is_tsv and reader.line_num > number:
                # Most TSV files do not quote: two lone quotation marks would merge these rows.
                Place(path, number).fail(
                    f"a quoted field reaches from line {number} to line {reader.line_num}; set "
                    "quoting: false in the task file if quotation marks are text, else write the "
                    "table as CSV or JSON Lines"
                )
            if len(seen) > 1 and all(line.count(delimiter) == len(row) - 1 for line in seen):
                if not merged:
                    logger.warning(
                        "%s:%d: a quoted field reaches from line %d to line %d, but each of these "
                        "lines looks like a row of its own; check the quotation marks",
                        path, number, number, reader.line_num,
                    )  # fmt: skip
                merged += 1
            seen.clear()
            yield number, row
            number = reader.line_num + 1
    except csv.Error as error:
        hint = "; set quoting: false in the task file if quotation marks are text" * is_tsv
        Place(path, number).fail(f"not valid {'TSV' if is_tsv else 'CSV'}: {error}{hint}")
    if merged > 1:
        logger.warning("%s: %s rows are like this one", path, f"{merged:,}")


def read_columns_jsonl(path: Path) -> Iterator[Record]:
    """Read JSON Lines for a task that names its columns; see `read_jsonl`.

    NaN and unpaired surrogates are faults of the values that hold them, which the task may not
    read. `Row` refuses those that it reads.
    """
    return read_jsonl(path, is_lenient=True)


def read_jsonl(path: Path, *, is_lenient: bool = False) -> Iterator[Record]:
    """Read JSON Lines.

    Args:
        path: the file.
        is_lenient: accept NaN and unpaired surrogates.

    Raises:
        DataError: a line is not a JSON object; the message names file and line.
    """
    for number, line in numbered_lines(read_text(path)):
        if not line.strip():
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if is_lenient and (record := _read_leniently(line)) is not None:
                yield Record(Place(path, number), record)
                continue
            is_document = number == 1 and line.strip() in ("[", "{")
            Place(path, number).fail(
                f"not valid JSON: {error.msg} at character {error.colno}"
                f"{'; write one object per line, not one document' * is_document}"
            )
        if not isinstance(record, dict):
            Place(path, number).fail(f"expected a JSON object, found {kind_of(record)}")
        yield Record(Place(path, number), record)


def _read_leniently(line: str) -> dict[str, Any] | None:
    """Read a JSON object as Python does; None: it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_parquet(path: Path) -> Iterator[Record]:
    """Read a Parquet file; records are numbered by row.

    Raises:
        DataError: the file is damaged.
    """
    import pyarrow
    import pyarrow.parquet

    require_regular(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            names = _class_names(table.schema_arrow.metadata)
            yield from _batches(path, table.iter_batches(), names, 1)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise MalformedInputError(f"{path}: damaged Parquet file ({_one_line(error)})") from error


def read_datasets(path: Path) -> Iterator[Record]:
    """Read a split that ``datasets`` saved with ``save_to_disk``; class ids become names.

    Raises:
        DataError: the folder is not one, or a file is damaged.
    """
    import pyarrow

    state = path / "state.json"
    if not state.is_file():
        raise MalformedInputError(
            f"{path}: no state.json; expected a split saved by datasets.save_to_disk"
        )
    require_below(state, path)
    content = read_document(state)
    row = 1
    for entry in list_of(Place(state, 1), content, "_data_files"):
        # A file name only: nothing outside the folder is opened.
        file = path / Path(string_of(Place(state, 1), entry, "filename")).name
        require_regular(file)
        require_below(file, path)
        try:
            with pyarrow.memory_map(str(file)) as source:
                reader = pyarrow.ipc.open_stream(source)
                for record in _batches(file, reader, _class_names(reader.schema.metadata), row):
                    row += 1
                    yield record
        except (pyarrow.ArrowException, OSError) as error:
            raise MalformedInputError(f"{file}: damaged Arrow file ({_one_line(error)})") from error


def read_document(path: Path) -> dict[str, Any]:
    """Read a file that is one JSON object.

    Raises:
        DataError: it is not; the message names file and line.
    """
    document = parse_json(path, read_text(path))
    if not isinstance(document, dict):
        Place(path, 1).fail(f"expected a JSON object, found {kind_of(document)}")
    return document


def parse_json(path: Path, text: str) -> Any:
    """Parse a JSON document.

    Raises:
        DataError: it is not valid; the message names file and line.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        Place(path, error.lineno).fail(f"not valid JSON: {error.msg} at character {error.colno}")
    except (RecursionError, ValueError) as error:
        # Nested too deeply, or a number of more digits than Python converts.
        Place(path, 1).fail(f"not valid JSON: {_one_line(error)}")
    if lone := _LONE_SURROGATE.search(text):
        line = text.count("\n", 0, lone.start()) + 1
        Place(path, line).fail(f"not valid JSON: lone surrogate {lone[0]}")
    return document


def _batches(
    path: Path, batches: Any, names: dict[str, Sequence[str]], row: int
) -> Iterator[Record]:
    """Yield the rows of Arrow batches; integers of class columns become their names."""
    for batch in batches:
        for values in batch.to_pylist():
            for column, classes in names.items():
                if column in values:
                    values[column] = _class_name(values[column], classes)
            yield Record(Place(path, row), values)
            row += 1


def _class_name(value: Any, classes: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_class_name(item, classes) for item in value]
    if isinstance(value, int) and 0 <= value < len(classes):
        return classes[value]
    return value


def _class_names(metadata: dict[bytes, bytes] | None) -> dict[str, Sequence[str]]:
    """Return the names of ``ClassLabel`` columns that ``datasets`` notes in Arrow's metadata."""
    try:
        info = orjson.loads((metadata or {}).get(b"huggingface", b"{}"))
        features = info.get("info", {}).get("features", {})
        found: dict[str, Sequence[str]] = {}
        for column, feature in features.items():
            inner = feature.get("feature", feature)
            if isinstance(inner, dict) and inner.get("_type") == "ClassLabel":
                found[column] = [str(name) for name in inner["names"]]
        return found
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return {}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

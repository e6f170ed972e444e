"""Records of labelled files: values by column, with the place they were read from.

Formats that have no layout of their own: TSV, CSV, JSON, JSON Lines, Parquet, and folders of
``datasets.save_to_disk``.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import orjson

from megatron_deberta.errors import ConfigError, MalformedInputError, MissingInputError

_MOST_DIGITS = 20


_MOST_EXPANSION = 100
"""Ratio of decompression that no text reaches: about 4 is usual, and gzip allows 1,032."""


_BLOCK = 1 << 22


_COLUMNS_SHOWN = 12


_SMALL = 64 << 20
"""Bytes that any file may decompress to."""


class Place(NamedTuple):
    """Where a record or a part of one was read.

    Attributes:
        path: the file.
        line: line (or row of a table), from 1, or a function that finds it when it is needed.
    """

    path: Path
    line: int | Callable[[], int]

    def fail(self, problem: str) -> NoReturn:
        """Raise a ``MalformedInputError`` that names file and line."""
        line = self.line if isinstance(self.line, int) else self.line()
        raise MalformedInputError(f"{self.path}:{line}: {problem}")


class Record(NamedTuple):
    """One record.

    Attributes:
        place: where it begins.
        values: values by column.
    """

    place: Place
    values: dict[str, Any]


def require_regular(path: Path) -> None:
    """Check that a path is a regular file: pipes and devices may block or never end.

    Raises:
        MissingInputError: it is something else, or cannot be opened.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MissingInputError(f"{path}: cannot be read: {reason}") from error
    if not stat.S_ISREG(mode):
        raise MissingInputError(f"{path}: not a regular file; give a file on disk")


def require_below(path: Path, folder: Path) -> None:
    """Check that a file named by a task or found in its data lies in the data folder.

    Raises:
        ConfigError: a link or ``..`` leads outside.
    """
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"{path}: leads outside the data folder {folder}; copy the file, or give --data the "
            "folder that holds it"
        )


def read_bytes(path: Path) -> bytes:
    """Read a regular file, decompressed if its name ends in ``.gz``.

    Raises:
        DataError: it cannot be read, is damaged, or expands more than any text does.
    """
    require_regular(path)
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        size = path.stat().st_size
        limit = max(_SMALL, size * _MOST_EXPANSION)
        blocks, total = [], 0
        with gzip.open(path) as stream:
            while total <= limit and (block := stream.read(_BLOCK)):
                blocks.append(block)
                total += len(block)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MalformedInputError(f"{path}: cannot be read: {reason}") from error
    if total > limit:
        raise MalformedInputError(
            f"{path}: {size:,} bytes expand to more than {limit:,}, which no table does; give the "
            "decompressed file if this is right"
        )
    return b"".join(blocks)


def read_text(path: Path) -> str:
    r"""Read a UTF-8 file without its byte-order mark.

    Raises:
        DataError: it cannot be read, is empty, is not UTF-8 or contains a NUL character.
    """
    content = read_bytes(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        Place(path, line).fail(f"not UTF-8 (byte {content[error.start]:#04x})")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        Place(path, line).fail("contains a NUL character")
    if not text.strip():
        Place(path, 1).fail("the file is empty")
    return text


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    r"""Yield number and content of each line; only ``\n`` and ``\r\n`` end a line."""
    for number, line in enumerate(io.StringIO(text, newline="\n"), 1):
        yield number, line.rstrip("\n").removesuffix("\r")


def value_of(place: Place, values: Any, key: str) -> Any:
    """Return a value of a JSON object.

    Args:
        place: names file and line in messages.
        values: the object.
        key: of the value.

    Raises:
        DataError: ``values`` is not an object, or the key is missing.
    """
    if not isinstance(values, dict):
        place.fail(f"expected an object with {key!r}, found {kind_of(values)}")
    if key not in values:
        there = ", ".join(repr(name) for name in list(values)[:12]) or "no keys"
        place.fail(f"no {key!r} (there are {there})")
    return values[key]


def string_of(place: Place, values: Any, key: str) -> str:
    """Return a string of a JSON object that is not blank.

    Arguments as in ``value_of``.

    Raises:
        DataError: the key is missing or its value is not such a string.
    """
    value = value_of(place, values, key)
    if not isinstance(value, str):
        place.fail(f"{key!r} is {kind_of(value)}, not a string")
    if not value.strip():
        place.fail(f"{key!r} is empty")
    return value


def integer_of(place: Place, values: Any, key: str) -> int:
    """Return an integer of a JSON object.

    Arguments as in ``value_of``.

    Raises:
        DataError: the key is missing or its value is not an integer.
    """
    value = value_of(place, values, key)
    if type(value) is not int:
        place.fail(f"{key!r} is {value!r}, not an integer")
    return value


def list_of(place: Place, values: Any, key: str) -> list[Any]:
    """Return a list of a JSON object.

    Arguments as in ``value_of``.

    Raises:
        DataError: the key is missing or its value is not a list.
    """
    value = value_of(place, values, key)
    if not isinstance(value, list):
        place.fail(f"{key!r} is {kind_of(value)}, not a list")
    return value


def kind_of(value: object) -> str:
    """Return the kind of a JSON value, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


def whole_number(text: str) -> int | None:
    """Return the number that a text writes in digits; None for any other text."""
    # Python refuses to convert thousands of digits, and no index has twenty.
    return int(text) if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS else None


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
            kind = "tabs" if delimiter == "\t" else "commas"
            named = ", ".join(names[:_COLUMNS_SHOWN]) + ", ..." * (len(names) > _COLUMNS_SHOWN)
            Place(path, number).fail(
                f"{len(row)} columns instead of {len(names)}; expected the columns of the "
                f"{'header' if header else 'first line'} ({named}), separated by {kind}"
            )
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


def read_jsonl(path: Path, *, is_lenient: bool = False) -> Iterator[Record]:
    """Read JSON Lines.

    Args:
        path: the file.
        is_lenient: accept NaN and unpaired surrogates, which are faults of the values that hold
            them: `Row` refuses those that a task reads.

    Raises:
        DataError: a line is not a JSON object; the message names file and line.
    """
    for number, line in numbered_lines(read_text(path)):
        if not line.strip():
            continue
        is_document = number == 1 and line.strip() in ("[", "{")
        remedy = "; write one object per line, not one document" if is_document else ""
        place = Place(path, number)
        yield Record(place, json_object(place, line, remedy, is_lenient=is_lenient))


def json_object(
    place: Place, line: str, remedy: str, *, is_lenient: bool = False
) -> dict[str, Any]:
    """Parse a line of JSON Lines.

    Args:
        place: names file and line in messages.
        line: the line.
        remedy: end of the message if it is not valid JSON.
        is_lenient: see `read_jsonl`.

    Raises:
        DataError: it is not a JSON object.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        try:
            # Python accepts more.
            record = json.loads(line) if is_lenient else None
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            place.fail(f"not valid JSON: {error.msg} at character {error.colno}{remedy}")
    if not isinstance(record, dict):
        place.fail(f"expected a JSON object, found {kind_of(record)}")
    return record


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
        # Offsets that lead out of the buffers of a damaged file would end the process.
        batch.validate(full=True)
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

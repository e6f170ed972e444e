"""Records of labelled files: values by column, with the place they were read from."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_deberta.errors import DataError

_MOST_DIGITS = 20


class Place(NamedTuple):
    """Where a record or a part of one was read.

    Attributes:
        path: the file.
        line: line (or row of a table), from 1, or a function that finds it when it is needed.
    """

    path: Path
    line: int | Callable[[], int]

    def fail(self, problem: str) -> NoReturn:
        """Raise a ``DataError`` that names file and line."""
        line = self.line if isinstance(self.line, int) else self.line()
        raise DataError(f"{self.path}:{line}: {problem}")


class Record(NamedTuple):
    """One record.

    Attributes:
        place: where it begins.
        values: values by column.
    """

    place: Place
    values: dict[str, Any]


def read_bytes(path: Path) -> bytes:
    """Read a file, decompressed if its name ends in ``.gz``.

    Raises:
        DataError: it cannot be read or is damaged.
    """
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path}: cannot be read: {reason}") from error


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

    Raises:
        DataError: the key is missing or its value is not an integer.
    """
    value = value_of(place, values, key)
    if type(value) is not int:
        place.fail(f"{key!r} is {value!r}, not an integer")
    return value


def list_of(place: Place, values: Any, key: str) -> list[Any]:
    """Return a list of a JSON object.

    Raises:
        DataError: the key is missing or its value is not a list.
    """
    value = value_of(place, values, key)
    if not isinstance(value, list):
        place.fail(f"{key!r} is {kind_of(value)}, not a list")
    return value


def kind_of(value: object) -> str:
    """Name the kind of a JSON value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


def whole_number(text: str) -> int | None:
    """Return the number that a text writes in digits; None for any other text."""
    # Python refuses to convert thousands of digits, and no index has twenty.
    return int(text) if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS else None

"""Records of labelled files: values by column, with the place they were read from."""

from __future__ import annotations

import gzip
import io
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_deberta.errors import ConfigError, MalformedInputError, MissingInputError

_MOST_DIGITS = 20
_MOST_EXPANSION = 100
"""Ratio of decompression that no text reaches: about 4 is usual, and gzip allows 1,032."""
_BLOCK = 1 << 22
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

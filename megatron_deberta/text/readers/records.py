"""Parsing of records: each is a document or a defect with its reason; blank lines are skipped."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import orjson

from megatron_deberta.text.readers.sources import TextFormat

Normalization = Literal["none", "nfc", "nfkc"]
# What may be a document: number of its first line, byte offset, content with its line ends.
Record = tuple[int, int, bytes]

MALFORMED = "malformed JSON"
NOT_OBJECT = "not a JSON object"
NO_KEY = "missing key"
NOT_TEXT = "not a string"
BAD_UTF8 = "invalid UTF-8"
SURROGATE = "lone surrogate"
NUL = "NUL character"
LONG = "document too long"
DAMAGED = "damaged file"
EMPTY = "empty"

NO_JSON = object()
_SURROGATES = re.compile("[\ud800-\udfff]")
_CLOSING = {"[": "]", "{": "}"}
# Strings, in which brackets mean nothing, and brackets.
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)

# Share of records that may be bad before a command fails.
DEFAULT_ALLOW_BAD = 0.001


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


class Document(NamedTuple):
    """A record that can be used.

    Attributes:
        line: line of the file, or row of the table, from 1 where reading began.
        offset: byte offset of the line in the uncompressed file; -1 in a table.
        texts: one for each key.
    """

    line: int
    offset: int
    texts: tuple[str, ...]


class Defect(NamedTuple):
    """A record that cannot be used; see ``Document`` for where it is.

    Attributes:
        reason: one of a few, to be counted by.
        detail: what exactly.
    """

    line: int
    offset: int
    reason: str
    detail: str

    def describe(self, file: str, lines_before: int | None = None) -> bytes:
        """Return the line of the quarantine list; None: the record's line is unknown."""
        line = {} if lines_before is None else {"line": lines_before + self.line}
        offset = {"offset": self.offset} if self.offset >= 0 else {}
        content = {"file": file, **line, **offset, "reason": self.reason, "detail": self.detail}
        return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


class UnusableError(ValueError):
    """Reason and detail, as of a ``Defect``, why a record cannot be used."""


class RecordBatch(NamedTuple):
    """Some records of one file.

    Attributes:
        documents: those that can be used, in order.
        defects: those that cannot, in order.
        text_bytes: bytes they take in the uncompressed file.
        records: all of them as they stood in a file of text.
    """

    documents: list[Document]
    defects: list[Defect]
    text_bytes: int
    records: Sequence[Record] = ()


def parse_records(
    records: Iterable[Record], text_format: TextFormat, options: ReadOptions
) -> tuple[list[Document], list[Defect]]:
    """Read what a file's records hold.

    Args:
        records: whole ones; blank ones are left out.
        text_format: ``jsonl``, ``file``, ``line`` or ``paragraph``.
        options: what is wanted of them.

    Returns:
        Documents and defects, each in order.
    """
    documents: list[Document] = []
    defects: list[Defect] = []
    is_json = text_format == "jsonl"
    keys = options.keys
    is_quick = is_json and options.normalization == "none" and len(keys) == 1
    read = _read_json if is_json else _read_text
    get = operator.itemgetter(keys[0])
    for line, offset, content in records:
        if is_quick:
            # Nearly every record, in half the time; all others come to their reason below.
            try:
                text = get(orjson.loads(content))
            except (orjson.JSONDecodeError, KeyError, TypeError):
                text = None
            if type(text) is str and "\0" not in text:
                documents.append(Document(line, offset, (text,)))
                continue
        if content.isspace():
            continue
        try:
            texts = finish_texts(read(content, keys, offset), options)
        except UnusableError as error:
            defects.append(Defect(line, offset, *error.args))
        else:
            documents.append(Document(line, offset, texts))
    return documents, defects


def finish_texts(texts: tuple[str, ...], options: ReadOptions) -> tuple[str, ...]:
    """Normalize texts.

    Raises:
        UnusableError: one cannot be used.
    """
    for key, text in zip(options.keys, texts, strict=True):
        if "\0" in text:
            raise UnusableError(NUL, f"at character {text.index(chr(0))} of key {key!r}")
    if options.normalization == "none":
        return texts
    form: Literal["NFC", "NFKC"] = "NFC" if options.normalization == "nfc" else "NFKC"
    return tuple(unicodedata.normalize(form, text) for text in texts)


def decode_text(content: bytes, offset: int) -> str:
    """Decode UTF-8.

    Args:
        content: the bytes.
        offset: of the first of them in the file; negative: a table.

    Raises:
        UnusableError: it is none; a surrogate written as three bytes is named as such.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        bad = content[error.start]
        is_surrogate = bad == 0xED and content[error.start + 1 : error.start + 2] >= b"\xa0"
        where = f"offset {offset + error.start}" if offset >= 0 else f"byte {error.start}"
        reason = SURROGATE if is_surrogate else BAD_UTF8
        raise UnusableError(reason, f"byte {bad:#04x} at {where} ({error.reason})") from error


def kind_of(value: object) -> str:
    """Return the kind of a JSON value, for messages."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _read_text(content: bytes, keys: Sequence[str], offset: int) -> tuple[str, ...]:
    return (decode_text(content, offset).strip(),) * len(keys)


def _read_json(content: bytes, keys: Sequence[str], offset: int) -> tuple[str, ...]:
    try:
        record = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        if content.endswith(b"\n"):
            # What is said of a line does not count its end.
            return _read_json(content[:-1], keys, offset)
        record = read_leniently(content)
        # Faults of other keys are no faults of the text.
        wanted = [record.get(key) for key in keys] if type(record) is dict else []
        if record is NO_JSON or any(
            type(text) is str and _SURROGATES.search(text) for text in wanted
        ):
            raise _bad_json(content, str(error), offset) from error
    if type(record) is not dict:
        raise UnusableError(NOT_OBJECT, kind_of(record))
    texts: list[str] = []
    for key in keys:
        text = record.get(key)
        if type(text) is not str:
            if key in record:
                raise UnusableError(NOT_TEXT, f"key {key!r} is {kind_of(text)}")
            present = ", ".join(list(record)[:8]) or "none"
            raise UnusableError(NO_KEY, f"no key {key!r} (keys: {present})")
        texts.append(text)
    return tuple(texts)


def read_leniently(content: bytes) -> Any:
    """Read JSON of any depth, with NaN, invalid UTF-8 and lone surrogates; ``NO_JSON``: it is none.

    What is not UTF-8 becomes lone surrogates, and what lies deeper than the values of a record's
    keys becomes null.
    """
    text = content.decode("utf-8", "surrogateescape")
    # The values of numbers do not matter; they may have more digits than Python reads.
    read = functools.partial(json.loads, parse_int=lambda _: 0, parse_float=lambda _: 0)
    with contextlib.suppress(ValueError, RecursionError):
        try:
            return read(text)
        except RecursionError:
            return read(_without_depth(text))
    return NO_JSON


def _without_depth(text: str) -> str:
    """Replace the arrays and objects in a record by null.

    Raises:
        ValueError: brackets do not match.
    """
    parts: list[str] = []
    open_brackets: list[str] = []
    done = 0
    for match in _TOKENS.finditer(text):
        token = match[0]
        if token in _CLOSING:
            if len(open_brackets) == 1:
                parts.append(text[done : match.start()])
                done = match.start()
            open_brackets.append(_CLOSING[token])
        elif token in "]}":
            if not open_brackets or open_brackets.pop() != token:
                raise ValueError("brackets do not match")
            if len(open_brackets) == 1:
                parts.append("null")
                done = match.end()
    if open_brackets:
        raise ValueError("a bracket is not closed")
    return "".join([*parts, text[done:]])


def _bad_json(content: bytes, error: str, offset: int) -> UnusableError:
    text = decode_text(content, offset)
    try:
        # Python's own reader takes lone surrogates, so what it takes has nothing worse.
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError as bad:
        return UnusableError(SURROGATE, f"\\u{ord(bad.object[bad.start]):04x}")
    except (ValueError, RecursionError):
        pass
    return UnusableError(MALFORMED, error)

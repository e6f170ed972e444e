"""The documents of a block.

Owns parsing and the messages that say what is wrong with which line. Refuses to skip anything but
blank lines: a record that cannot be read is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NoReturn

import orjson

from megatron_deberta.errors import DataError
from megatron_deberta.preprocess.sources import BYTE_ORDER_MARK, Block

_BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n)+")


def parse_documents(block: Block, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Read the documents of a block.

    Args:
        block: whole records.
        keys: JSON keys whose text is wanted; plain text has one text whatever its key is called.

    Yields:
        One text for each key.

    Raises:
        DataError: a line is no UTF-8 or no JSON object, or a key is missing or not text.
    """
    if block.text_format == "jsonl":
        yield from _parse_jsonl(block, keys)
        return
    text = _decode(block)
    is_line = block.text_format == "line"
    for document in text.split("\n") if is_line else _BLANK_LINES.split(text):
        if document := document.strip():
            yield (document,) * len(keys)


def _parse_jsonl(block: Block, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    content = block.content
    if block.offset_bytes == 0:
        content = content.removeprefix(BYTE_ORDER_MARK)
    for index, line in enumerate(content.split(b"\n")):
        if not line.strip():
            continue
        where = f"{block.source}: line {block.first_line + index}"
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            _decode(block)
            raise DataError(
                f"{where}: not JSON ({error}); expected one JSON object a line"
            ) from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: {_kind(record)}, not a JSON object with key {keys[0]!r}")
        yield tuple(_text_of(record, key, where) for key in keys)


def _text_of(record: dict[str, object], key: str, where: str) -> str:
    if key not in record:
        present = ", ".join(list(record)[:8]) or "none"
        raise DataError(f"{where}: no key {key!r} (keys: {present}); set --input-key")
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: key {key!r} is {_kind(value)}, not text")
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _decode(block: Block) -> str:
    try:
        return block.content.decode("utf-8-sig" if block.offset_bytes == 0 else "utf-8")
    except UnicodeDecodeError as error:
        _refuse_bytes(block, error)


def _refuse_bytes(block: Block, error: UnicodeDecodeError) -> NoReturn:
    # The utf-8-sig codec counts from behind the mark.
    marked = block.offset_bytes == 0 and block.content.startswith(BYTE_ORDER_MARK)
    start = error.start + (len(BYTE_ORDER_MARK) if marked else 0)
    line = block.first_line + block.content.count(b"\n", 0, start)
    raise DataError(
        f"{block.source}: line {line}: byte {block.content[start]:#04x} at offset "
        f"{block.offset_bytes + start} is not UTF-8 ({error.reason}); convert the file"
    ) from error

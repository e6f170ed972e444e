"""Texts to predict, outside the files of a task: lines, or JSON objects with the key ``text``."""

from __future__ import annotations

import gzip
import io
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import orjson

from megatron_deberta.errors import ConfigError, MalformedInputError, MissingInputError
from megatron_deberta.files import did_you_mean, open_regular
from megatron_deberta.tasks.examples import Example, hypotheses
from megatron_deberta.tasks.records import Place, Record, json_object, kind_of, list_of, string_of
from megatron_deberta.tasks.task import TaskConfig

Format = Literal["auto", "jsonl", "text"]

TEXT_KEYS = ("text", "text_pair")
"""Keys of the first and the second text of a JSON object."""

STANDARD_INPUT = "standard input"

_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_TEXT_SUFFIXES = (".txt", ".text")
_TABLE_SUFFIXES = (".csv", ".tsv", ".parquet", ".arrow")
_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = "\ufeff"
_LONGEST = 100_000_000
"""Bytes of a line, as of a document in ``preprocess``; a compressed file may hold any number."""


def check_text_files(paths: Sequence[str]) -> int:
    """Check that files of texts can be opened, and return their size in bytes.

    Raises:
        ConfigError: a file is a table.
        MissingInputError: a file cannot be opened, or is not a regular one.
    """
    size = 0
    for path in map(Path, paths):
        suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
        if suffix in _TABLE_SUFFIXES:
            raise ConfigError(
                f"{path}: a table; write a task file that names its columns, and predict TASK "
                "--data DIR, or give JSON Lines or a text per line"
            )
        try:
            with open_regular(path) as stream:
                size += stream.seek(0, io.SEEK_END)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            hint = did_you_mean(path)
            raise MissingInputError(f"{path}: cannot be read: {reason}{hint}") from error
    return size


def read_text_files(
    paths: Iterable[str], text_format: Format, keys: Sequence[str], advance: Callable[[int], None]
) -> Iterator[Record]:
    """Yield the texts of files, each of which may be compressed by gzip.

    Args:
        paths: the files.
        text_format: see `read_text_lines`; auto: by the suffix, if it is a known one.
        keys: see `read_text_lines`.
        advance: called before each record with the bytes of all files that were read.

    Raises:
        DataError: a file cannot be read or is malformed; the message names file and line.
    """
    before = 0
    for path in map(Path, paths):
        suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
        known: Format = "jsonl" if suffix in _JSON_SUFFIXES else "text"
        is_known = suffix in (*_JSON_SUFFIXES, *_TEXT_SUFFIXES)
        chosen = known if text_format == "auto" and is_known else text_format
        try:
            with open_regular(path) as file:
                is_compressed = file.read(2) == _GZIP
                file.seek(0)
                stream = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_compressed else file
                for record in read_text_lines(stream, path, chosen, keys):
                    advance(before + file.tell())
                    yield record
                before += file.tell()
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise MalformedInputError(f"{path}: cannot be read: {reason}") from error


def read_text_lines(
    stream: BinaryIO, path: Path, text_format: Format, keys: Sequence[str] = TEXT_KEYS
) -> Iterator[Record]:
    """Yield a record per line that is not blank, with the keys of `TEXT_KEYS`.

    Args:
        stream: of UTF-8, whatever the locale is.
        path: name of the source, for messages.
        text_format: ``jsonl``: objects, whose other keys are kept; ``text``: a text per line;
            ``auto``: objects if the first line is one that has the first key.
        keys: names of the keys of `TEXT_KEYS` in the objects.

    Raises:
        MalformedInputError: a line is not UTF-8, too long, or not such an object.
    """
    for number, content in enumerate(iter(lambda: stream.readline(_LONGEST + 1), b""), 1):
        place = Place(path, number)
        if len(content) > _LONGEST:
            place.fail(f"the line is longer than {_LONGEST:,} bytes; split it")
        try:
            line = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise MalformedInputError(
                f"{path} is not UTF-8 (line {number}: {error.reason}); convert it"
            ) from error
        # Only a line feed, with or without a carriage return, ends a line.
        line = line.removesuffix("\n").removesuffix("\r")
        line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        if "\0" in line:
            place.fail("contains a NUL character")
        if not line.strip():
            continue
        if text_format == "auto":
            text_format = "jsonl" if _is_object(line, keys) else "text"
        if text_format == "text":
            yield Record(place, {TEXT_KEYS[0]: line})
            continue
        remedy = "; write an object per line, or use --format text"
        values = json_object(place, line, remedy)
        if tuple(keys) != TEXT_KEYS[: len(keys)]:
            named = {
                name: values[key]
                for name, key in zip(TEXT_KEYS, keys, strict=False)
                if key in values
            }
            if TEXT_KEYS[0] not in named:
                there = ", ".join(map(repr, list(values)[:12])) or "no keys"
                place.fail(f"no {keys[0]!r} (there are {there}); name the key with --keys")
            values = {k: v for k, v in values.items() if k not in TEXT_KEYS} | named
        yield Record(place, values)


def _is_object(line: str, keys: Sequence[str]) -> bool:
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return isinstance(values, dict) and not values.keys().isdisjoint((keys[0], "words", "query"))


def text_examples(task: TaskConfig, records: Iterable[Record]) -> Iterator[Example]:
    """Yield texts as unlabelled examples of a task, numbered from 0 where they have no ``id``.

    Args:
        task: the task.
        records: with ``text``, of spans the question, and ``text_pair``, of spans the passage; of
            tokens, words separated by spaces, or a list ``words``; of choices, a list ``choices``,
            or none for a task with ``hypothesis``; of rerank, the query and a list ``passages``,
            or consecutive pairs of the same query.

    Raises:
        ConfigError: the task has a second segment and none is given, or the other way round.
        MalformedInputError: a value is missing, empty, or not of its type.
    """
    if task.head == "rerank":
        records = _queries(records)
    for number, (place, values) in enumerate(records):
        example = _text_example(task, place, values)
        name = values.get("id", number)
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            place.fail(f"'id' is {kind_of(name)}, not a string or a whole number")
        yield Example(id=str(name), **example)


def _queries(records: Iterable[Record]) -> Iterator[Record]:
    """Yield a record per query, with all passages that follow each other in pairs with it."""

    def query(record: Record) -> object:
        return None if "passages" in record.values else record.values.get(TEXT_KEYS[0])

    for text, group in itertools.groupby(records, query):
        if text is None:
            yield from group
            continue
        pairs = list(group)
        passages = [each.values[TEXT_KEYS[1]] for each in pairs if TEXT_KEYS[1] in each.values]
        yield Record(pairs[0].place, {**pairs[0].values, "passages": passages})


def _text_example(task: TaskConfig, place: Place, values: Mapping[str, Any]) -> dict[str, Any]:
    text, pair = TEXT_KEYS
    if task.hypothesis:
        return {text: string_of(place, values, text), "choices": hypotheses(task)}
    if task.head == "rerank":
        return _passages(task, place, values)
    if task.head == "choices":
        return _choices(place, values)
    _check_pair(task, place, has_pair=values.get(pair) is not None)
    if task.head == "tokens":
        if "words" in values:
            return {"words": _texts_of(place, values, "words")}
        return {"words": tuple(string_of(place, values, text).split())}
    keys = [key for key in TEXT_KEYS if key == text or values.get(key) is not None]
    return {key: string_of(place, values, key) for key in keys}


def _texts_of(place: Place, values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    texts = list_of(place, values, key)
    if not texts or not all(isinstance(each, str) and each.strip() for each in texts):
        place.fail(f"{key!r} is not a list of texts")
    return tuple(texts)


def _passages(task: TaskConfig, place: Place, values: Mapping[str, Any]) -> dict[str, Any]:
    if not values.get("passages"):
        raise ConfigError(
            f"task {task.name} has a query and passages; give one with --text-pair, or a list "
            "'passages' in JSON Lines"
        )
    query = TEXT_KEYS[0] if TEXT_KEYS[0] in values else "query"
    passages = _texts_of(place, values, "passages")
    return {TEXT_KEYS[0]: string_of(place, values, query), "choices": passages}


def _choices(place: Place, values: Mapping[str, Any]) -> dict[str, Any]:
    if "choices" not in values:
        raise ConfigError(
            "multiple choice has several texts per example; predict a file of the task, or JSON "
            "Lines with a list 'choices'"
        )
    text = str(values.get(TEXT_KEYS[0]) or "")
    return {TEXT_KEYS[0]: text, "choices": _texts_of(place, values, "choices")}


def _check_pair(task: TaskConfig, place: Place, *, has_pair: bool) -> None:
    pair = TEXT_KEYS[1]
    # A task without columns is that of an export, of which it is not known.
    is_pair = task.head == "spans" or pair in task.columns
    if is_pair and not has_pair and task.head != "embed":
        first, second = ("question", "passage") if task.head == "spans" else ("text", "second text")
        raise ConfigError(
            f"task {task.name} has a {first} and a {second}; give the {second} with --text-pair, "
            f"or as {pair!r} in JSON Lines"
        )
    if has_pair and not is_pair and (task.columns or task.head == "tokens"):
        raise ConfigError(
            f"task {task.name} has no second text; omit --text-pair, or {pair!r} of {place.path}"
        )

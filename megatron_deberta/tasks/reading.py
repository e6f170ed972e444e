"""Reading of a task's splits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from megatron_deberta.errors import (
    ConfigError,
    MalformedInputError,
    MegatronDebertaError,
    MissingInputError,
)
from megatron_deberta.tasks import formats, records
from megatron_deberta.tasks.examples import Example, build_examples
from megatron_deberta.tasks.records import Record, require_below
from megatron_deberta.tasks.task import TaskConfig, is_labelled, load_task

READERS: Mapping[str, Callable[[Path], Iterator[Record]]] = {
    "jsonl": partial(records.read_jsonl, is_lenient=True),
    "parquet": records.read_parquet,
    "datasets": records.read_datasets,
    "squad": formats.read_squad,
    "record": formats.read_record,
    "multirc": formats.read_multirc,
    "wic": formats.read_wic,
    "wsc": formats.read_wsc,
    "race": formats.read_race,
    "quail": formats.read_quail,
    "copa_xml": formats.read_copa_xml,
}
"""Readers that need nothing but the path."""


TABLE_SUFFIXES: Mapping[str, str] = {
    ".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip
"""Formats that the reader ``table`` recognises, besides folders of ``datasets``."""


def read_records(task: TaskConfig, split: str, path: Path) -> Iterator[Record]:
    """Read the records of one file of a split.

    Args:
        task: the task.
        split: name of the split.
        path: the file, or a folder for readers of folders.

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    reader = task.reader
    name = _table_format(path) if reader == "table" else reader
    if path.is_dir() and name not in ("datasets", "race"):
        raise MalformedInputError(f"{path}: is a folder; reader {reader} reads files")
    if name in ("tsv", "csv"):
        own = task.splits[split].header
        return records.read_delimited(
            path,
            "\t" if name == "tsv" else ",",
            header=task.header if own is None else own,
            quoting=task.quoting,
            skip_short_rows=task.skip_short_rows,
        )
    if name == "squad_passages":
        part, others = task.splits[split].part, task.random_passages
        return formats.read_squad_passages(path, part=part, others=others, seed=task.passage_seed)
    if name == "conll":
        found = formats.read_conll(path, labelled=is_labelled(split), merge=task.merge_sentences)
        return found if task.head == "tokens" else map(formats.with_sentence, found)
    return READERS[name](path)


def _table_format(path: Path) -> str:
    if path.is_dir():
        return "datasets"
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in TABLE_SUFFIXES:
        raise MalformedInputError(
            f"{path}: is none of {', '.join(TABLE_SUFFIXES)}; set the task's reader"
        )
    return TABLE_SUFFIXES[suffix]


_TEST = "test"


def read_examples(task: TaskConfig, data: str | os.PathLike[str], split: str) -> list[Example]:
    """Read the examples of a split.

    Args:
        task: the task.
        data: folder of the data.
        split: name of one of the task's splits; labels are optional if it begins with ``test``.

    Raises:
        ConfigError: the task has no such split.
        DataError: a file is missing or malformed; the message names file and line.
    """
    paths = split_files(task, data, split)

    def read() -> Iterator[Record]:
        return chain.from_iterable(read_records(task, split, path) for path in paths)

    examples = list(build_examples(task, split, read))
    if not examples:
        raise MalformedInputError(f"{', '.join(map(str, paths))}: no examples")
    if not (part := task.splits[split].part):
        return examples
    return [example for example in examples if formats.in_part(example.group or example.id, part)]


def split_files(task: TaskConfig, data: str | os.PathLike[str], split: str) -> list[Path]:
    """Return the files of a split; folders (RACE, ``datasets``) count as one.

    Args:
        task: the task.
        data: folder of the data.
        split: name of the split.

    Raises:
        ConfigError: the task has no such split.
        DataError: a file is missing.
    """
    if split not in task.splits:
        raise ConfigError(f"task {task.name}: no split {split!r}; it has {', '.join(task.splits)}")
    suffixes = ("", *TABLE_SUFFIXES) if task.reader == "table" else ("",)
    return [_find(Path(data), name, suffixes) for name in task.splits[split].files]


def split_to_predict(name: str, data: str | os.PathLike[str]) -> str:
    """Return the split that a suggested ``predict`` names: test if it has files, or else dev.

    Args:
        name: task file or name of a packaged task.
        data: folder of the data.
    """
    ignored = suppress(MegatronDebertaError, OSError)
    with ignored:
        task = load_task(name)
        for split in (_TEST, *(each for each in task.splits if not is_labelled(each)), "dev"):
            with ignored:
                split_files(task, data, split)
                return split
    return _TEST


def _find(data: Path, name: str, suffixes: Sequence[str]) -> Path:
    for suffix in suffixes:
        for path in (data / f"{name}{suffix}", data / f"{name}{suffix}.gz"):
            if path.exists():
                require_below(path, data)
                return path
    if not data.is_dir():
        raise MissingInputError(f"{data}: no such folder")
    present = sorted(path.name for path in data.iterdir())[:12]
    listed = ", ".join(present) or "none"
    raise MissingInputError(f"{data / name}: no such file; there are {listed}")

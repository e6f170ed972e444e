"""The reader of each file format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from megatron_deberta.errors import MalformedInputError
from megatron_deberta.tasks.readers.choices import read_copa_xml, read_quail, read_race
from megatron_deberta.tasks.readers.conll import read_conll
from megatron_deberta.tasks.readers.records import Record
from megatron_deberta.tasks.readers.squad import read_record, read_squad
from megatron_deberta.tasks.readers.superglue import read_multirc, read_wic, read_wsc
from megatron_deberta.tasks.readers.tables import (
    read_columns_jsonl,
    read_datasets,
    read_delimited,
    read_parquet,
)
from megatron_deberta.tasks.task import TaskConfig

READERS: Mapping[str, Callable[[Path], Iterator[Record]]] = {
    "jsonl": read_columns_jsonl,
    "parquet": read_parquet,
    "datasets": read_datasets,
    "squad": read_squad,
    "record": read_record,
    "multirc": read_multirc,
    "wic": read_wic,
    "wsc": read_wsc,
    "race": read_race,
    "quail": read_quail,
    "copa_xml": read_copa_xml,
}
"""Readers that need nothing but the path."""
TABLE_SUFFIXES: Mapping[str, str] = {
    ".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip
"""Formats that the reader ``table`` recognises, besides folders of ``datasets``."""


def is_labelled(split: str) -> bool:
    """Return whether labels are required in a split; in test splits they are optional."""
    return not split.startswith(("test", "predict"))


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
        return read_delimited(
            path,
            "\t" if name == "tsv" else ",",
            header=task.header if own is None else own,
            quoting=task.quoting,
            skip_short_rows=task.skip_short_rows,
        )
    if name == "conll":
        return read_conll(path, labelled=is_labelled(split), merge=task.merge_sentences)
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

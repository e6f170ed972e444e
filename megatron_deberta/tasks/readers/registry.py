"""The reader of each file format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from megatron_deberta.tasks.readers.conll import read_conll
from megatron_deberta.tasks.readers.records import Record
from megatron_deberta.tasks.readers.tables import (
    read_datasets,
    read_delimited,
    read_jsonl,
    read_parquet,
)
from megatron_deberta.tasks.task import TaskConfig

READERS: Mapping[str, Callable[[Path], Iterator[Record]]] = {
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "datasets": read_datasets,
}
"""Readers that need nothing but the path."""


def is_labelled(split: str) -> bool:
    """Tell whether labels are required in a split; in test splits they are optional."""
    return not split.startswith(("test", "predict"))


def read_records(task: TaskConfig, split: str, path: Path) -> Iterator[Record]:
    """Read the records of one file.

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    if task.reader in ("tsv", "csv"):
        own = task.splits[split].header if split in task.splits else None
        return read_delimited(
            path,
            "\t" if task.reader == "tsv" else ",",
            header=task.header if own is None else own,
            quoting=task.quoting,
            skip_short_rows=task.skip_short_rows,
        )
    if task.reader == "conll":
        return read_conll(path, labelled=is_labelled(split))
    return READERS[task.reader](path)

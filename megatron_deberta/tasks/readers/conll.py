"""CoNLL files: one word per line, its label last, and a blank line after each sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_deberta.tasks.readers.records import Record, fail, numbered_lines, read_text

DOCUMENT_START = "-DOCSTART-"


def read_conll(path: Path, *, labelled: bool) -> Iterator[Record]:
    """Read sentences.

    Columns are separated by tabs if a line has one, else by spaces. Lines of white space only end a
    sentence (WNUT-17 has lines that hold a tab); ``-DOCSTART-`` begins a document.

    Args:
        path: the file.
        labelled: whether the last column is the label; False: lines may be the word alone.

    Yields:
        Records with ``words`` and ``tags`` (lists), ``id`` and ``document`` (its number).

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    words: list[str] = []
    tags: list[str] = []
    first = width = sentence = document = 0

    def finish() -> Record:
        return Record(
            first,
            {
                "words": words,
                "tags": tags,
                "id": str(sentence),
                "document": document,
                "line": first,
            },
        )

    for number, line in numbered_lines(read_text(path)):
        if line.strip() and not line.startswith(DOCUMENT_START):
            columns = line.rstrip().split("\t") if "\t" in line.rstrip() else line.split()
            width = width or len(columns)
            _check_columns(path, number, columns, width, labelled)
            if not words:
                first = number
            words.append(columns[0])
            tags += [columns[-1]] if len(columns) > 1 else []
            continue
        if words:
            yield finish()
            words, tags = [], []
            sentence += 1
        document += line.startswith(DOCUMENT_START)
    if words:
        yield finish()


def _check_columns(path: Path, number: int, columns: list[str], width: int, labelled: bool) -> None:
    if len(columns) != width:
        fail(path, number, f"{len(columns)} columns instead of {width}")
    if labelled and width < 2:
        fail(path, number, f"word {columns[0]!r} has no label")
    if not columns[0].strip():
        fail(path, number, "the word is empty")

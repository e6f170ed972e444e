"""CoNLL files: one word per line, its label last, and a blank line after each sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_deberta.tasks.readers.records import Place, Record, numbered_lines, read_text

DOCUMENT_START = "-DOCSTART-"


def read_conll(path: Path, *, labelled: bool, merge: bool) -> Iterator[Record]:
    """Read sentences.

    Columns are separated by tabs if a line has one, else by spaces. Lines of white space only end a
    sentence (WNUT-17 has lines that hold a tab); ``-DOCSTART-`` begins a document.

    Args:
        path: the file.
        labelled: whether the last column is the label; False: lines may be the word alone.
        merge: join the sentences of each document that begins with ``-DOCSTART-``.

    Yields:
        Records with ``words``, ``tags`` and ``lines`` (of the file, one per word), ``id``, and
        ``breaks``, the indices of words that begin a sentence other than the first one.

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    collected = _Sentences(path)
    width = 0
    in_document = False
    for number, line in numbered_lines(read_text(path)):
        columns = _columns(line)
        is_start = columns[:1] == [DOCUMENT_START]
        if columns and not is_start:
            width = width or len(columns)
            _check_columns(Place(path, number), columns, width, labelled)
            collected.add(number, columns)
        elif is_start or not (merge and in_document):
            yield from collected.finish()
        else:
            collected.end_sentence()
        in_document |= is_start
    yield from collected.finish()


def _columns(line: str) -> list[str]:
    """Return the columns of a line; other white space than spaces and tabs is text."""
    stripped = line.strip(" \t")
    if "\t" in stripped:
        return [column.strip(" ") for column in line.rstrip(" \t").split("\t")]
    return [column for column in stripped.split(" ") if column]


class _Sentences:
    """The words of the record that is being read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        self._reset()

    def _reset(self) -> None:
        self._words: list[str] = []
        self._tags: list[str] = []
        self._lines: list[int] = []
        self._breaks: list[int] = []

    def add(self, line: int, columns: list[str]) -> None:
        self._lines.append(line)
        self._words.append(columns[0])
        self._tags += columns[-1:] if len(columns) > 1 else []

    def end_sentence(self) -> None:
        if self._words and self._breaks[-1:] != [len(self._words)]:
            self._breaks.append(len(self._words))

    def finish(self) -> Iterator[Record]:
        """Yield the record, if there is one, and begin the next."""
        if not self._words:
            return
        breaks = [at for at in self._breaks if at < len(self._words)]
        values = {
            "words": self._words,
            "lines": self._lines,
            "id": str(self._count),
            "breaks": breaks,
        }
        if self._tags:
            values["tags"] = self._tags
        yield Record(Place(self._path, self._lines[0]), values)
        self._count += 1
        self._reset()


def _check_columns(place: Place, columns: list[str], width: int, labelled: bool) -> None:
    if len(columns) != width:
        place.fail(f"{len(columns)} columns instead of {width}")
    if labelled and width < 2:
        place.fail(f"word {columns[0]!r} has no label")
    if not columns[0].strip():
        place.fail("the word is empty")

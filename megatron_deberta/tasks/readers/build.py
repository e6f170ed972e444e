"""Examples from records: columns, templates and labels as the task's config names them."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_deberta.tasks.examples import Answer, Example
from megatron_deberta.tasks.readers.records import Record, fail, kind_of
from megatron_deberta.tasks.readers.registry import is_labelled
from megatron_deberta.tasks.task import TaskConfig

_UNLABELLED = ("", "-1", "None")
"""Labels that test files have instead of the hidden ones."""


def build_examples(
    task: TaskConfig, split: str, records: Iterable[Record], path: Path
) -> Iterator[Example]:
    """Build examples from the records of one file.

    Raises:
        DataError: a column is missing, or a value is not what the head needs; the message names
            file and line.
    """
    own = task.splits[split].columns if split in task.splits else {}
    columns = own or task.columns
    build = _BUILDERS[task.head]
    number = 0
    for record in records:
        row = _Row(task, columns, record, path, labelled=is_labelled(split))
        if row.is_skipped():
            continue
        yield build(row, number)
        number += 1
    if not number:
        fail(path, 1, "no examples in this file")


class _Row:
    """A record as seen through the task's columns."""

    def __init__(
        self,
        task: TaskConfig,
        columns: Mapping[str, Any],
        record: Record,
        path: Path,
        *,
        labelled: bool,
    ) -> None:
        self.task = task
        self.labelled = labelled
        self._columns = columns
        self._line, self._values = record
        self._path = path

    def fail(self, problem: str) -> Any:
        fail(self._path, self._line, problem)

    def is_skipped(self) -> bool:
        if not self.task.skip_labels or "label" not in self._columns:
            return False
        return str(self._values.get(str(self._columns["label"]))) in self.task.skip_labels

    def has(self, role: str) -> bool:
        """Tell whether the role has a column, and in optional labels whether the file has it."""
        name = self._columns.get(role)
        if name is None:
            return False
        return self.labelled or role not in ("label", "tags", "answers") or name in self._values

    def require(self, role: str) -> None:
        """Check that a role has a column where labels are not optional."""
        if self.labelled and role not in self._columns:
            self.fail(f"columns: no column is named as {role}")

    def raw(self, role: str) -> Any:
        """Return the value of a role's column."""
        return self._value(str(self._columns[role]))

    def text(self, role: str) -> str:
        """Return the text of a role: its column's, or a template filled in."""
        return self._text_of(self._columns[role])

    def texts(self, role: str) -> tuple[str, ...]:
        """Return the texts of several columns, or of one column that holds a list."""
        name = self._columns[role]
        if isinstance(name, list):
            return tuple(self._text_of(item) for item in name)
        value = self._value(str(name))
        if not isinstance(value, list):
            self.fail(f"{name!r} is {kind_of(value)}, not a list")
        for item in value:
            if not isinstance(item, str):
                self.fail(f"{name!r} contains {kind_of(item)}, not a string")
        return tuple(value)

    def id(self, number: int) -> str:
        return self.text("id") if self.has("id") else str(number)

    def class_index(self, value: Any) -> int | None:
        """Return the index of a label; None for the placeholder of a hidden one."""
        label = _written(value)
        if label in self.task.labels:
            return self.task.labels.index(label)
        if not self.labelled and label in _UNLABELLED:
            return None
        known = ", ".join(self.task.labels)
        self.fail(f"label {label!r} is not one of {known}")
        return None

    def _text_of(self, name: Any) -> str:
        template = str(name)
        if "{" not in template:
            return self._string(template)
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError as error:
            self.fail(f"columns: template {template!r}: {error}")
        return "".join(
            before + (self._string(column) if column is not None else "")
            for before, column, _, _ in parts
        )

    def _string(self, name: str) -> str:
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            self.fail(f"{name!r} is {kind_of(value)}, not a string")
        text = str(value)
        return self.task.values.get(name, {}).get(text, text)

    def _value(self, name: str) -> Any:
        value: Any = self._values
        # A key that contains a full stop is tried before the path that it could be.
        for part in [name] if name in self._values else name.split("."):
            if not isinstance(value, dict) or part not in value:
                there = ", ".join(map(repr, list(self._values)[:12]))
                self.fail(f"no column {name!r} (there are {there})")
            value = value[part]
        return value


def _written(value: Any) -> str:
    """Write a label as in text files."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _segments(row: _Row, number: int) -> Example:
    row.require("label")
    return Example(
        id=row.id(number),
        text=_nonempty(row, "text"),
        text_pair=_nonempty(row, "text_pair") if row.has("text_pair") else None,
        label=row.class_index(row.raw("label")) if row.has("label") else None,
        group=row.text("group") if row.has("group") else "",
    )


def _scored_segments(row: _Row, number: int) -> Example:
    row.require("label")
    return Example(
        id=row.id(number),
        text=_nonempty(row, "text"),
        text_pair=_nonempty(row, "text_pair") if row.has("text_pair") else None,
        label=_score(row) if row.has("label") else None,
    )


def _score(row: _Row) -> float | None:
    value = row.raw("label")
    if not row.labelled and str(value) in ("", "None"):
        return None
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if isinstance(value, bool) or not math.isfinite(score):
        row.fail(f"score {value!r} is not a number")
    low, high = row.task.label_range or (-math.inf, math.inf)
    if not low <= score <= high:
        row.fail(f"score {value} is not in {low:g}..{high:g}")
    return score


def _words(row: _Row, number: int) -> Example:
    words = row.texts("words")
    if not words:
        row.fail("the sentence has no words")
    row.require("tags")
    tags: tuple[int, ...] = ()
    if row.has("tags"):
        found = row.raw("tags")
        if not isinstance(found, list):
            row.fail(f"tags are {kind_of(found)}, not a list")
        indices = [row.class_index(tag) for tag in found]
        if None not in indices:
            tags = tuple(index for index in indices if index is not None)
    if len(tags) != len(words) and (row.labelled or tags):
        row.fail(f"{len(tags)} labels for {len(words)} words")
    return Example(id=row.id(number), words=words, tags=tags)


def _choices(row: _Row, number: int) -> Example:
    choices = row.texts("choices")
    if len(choices) < 2:
        row.fail(f"{len(choices)} choices; at least 2 are needed")
    question = row.text("question") if row.has("question") else ""
    row.require("label")
    return Example(
        id=row.id(number),
        text=_nonempty(row, "text") if row.has("text") else "",
        choices=tuple(f"{question} {choice}".strip() for choice in choices),
        label=_choice_label(row, len(choices)) if row.has("label") else None,
        group=row.text("group") if row.has("group") else "",
    )


def _choice_label(row: _Row, choices: int) -> int | None:
    value = row.raw("label")
    if row.task.labels:
        label = row.class_index(value)
    else:
        text = _written(value)
        label = int(text) if text.isascii() and text.isdigit() else None
        if label is None and (row.labelled or text not in _UNLABELLED):
            row.fail(f"label {text!r} is not the number of a choice")
    if label is not None and label >= choices:
        row.fail(f"label {_written(value)!r} is beyond the {choices} choices")
    return label


def _spans(row: _Row, number: int) -> Example:
    context = _nonempty(row, "context")
    answers = _answers(row, row.raw("answers"), context) if row.has("answers") else ()
    if row.labelled and not answers and not row.task.unanswerable:
        row.fail("the question has no answer; set unanswerable for data such as SQuAD 2.0")
    return Example(
        id=row.id(number), text=_nonempty(row, "question"), text_pair=context, answers=answers
    )


def _answers(row: _Row, value: Any, context: str) -> tuple[Answer, ...]:
    """Check answers: a list of objects as in SQuAD's files, or ``datasets``' object of lists."""
    if isinstance(value, dict) and {"text", "answer_start"} <= value.keys():
        texts, starts = value["text"], value["answer_start"]
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            row.fail("answers: text and answer_start are not lists of equal length")
        value = [{"text": t, "answer_start": s} for t, s in zip(texts, starts, strict=True)]
    if not isinstance(value, list):
        row.fail(f"answers are {kind_of(value)}, not a list")
    return tuple(checked_answer(row.fail, item, context) for item in value)


def checked_answer(report: Callable[[str], Any], value: Any, context: str) -> Answer:
    """Return an answer that stands in the passage where it says.

    Args:
        report: raises an error with a message.
        value: object with ``text`` and ``answer_start``.
        context: the passage.
    """
    text = value.get("text") if isinstance(value, dict) else None
    start = value.get("answer_start") if isinstance(value, dict) else None
    if not isinstance(text, str) or type(start) is not int:
        report("an answer needs text (a string) and answer_start (an integer)")
        raise AssertionError
    if not text.strip():
        report("an answer is empty")
    found = context[max(start, 0) : max(start, 0) + len(text)]
    if start < 0 or found != text:
        report(
            f"answer {text[:40]!r} is not at character {start} of the passage, "
            f"where {found[:40]!r} is"
        )
    return Answer(text, start)


def _nonempty(row: _Row, role: str) -> str:
    text = row.text(role)
    if not text.strip():
        row.fail(f"{role} is empty")
    return text


_BUILDERS: Mapping[str, Callable[[_Row, int], Example]] = {
    "classification": _segments,
    "regression": _scored_segments,
    "spans": _spans,
    "tokens": _words,
    "choices": _choices,
}

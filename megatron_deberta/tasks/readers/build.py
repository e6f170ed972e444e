"""Examples from records, as the task's head needs them."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from megatron_deberta.tasks.examples import Answer, Example
from megatron_deberta.tasks.readers.records import Record, kind_of, whole_number
from megatron_deberta.tasks.readers.registry import is_labelled
from megatron_deberta.tasks.readers.row import Row, class_indices, split_words, written_label
from megatron_deberta.tasks.task import TaskConfig

_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")


def build_examples(task: TaskConfig, split: str, records: Iterable[Record]) -> Iterator[Example]:
    """Build the examples of a split.

    Args:
        task: the task.
        split: name of the split.
        records: of its files.

    Raises:
        DataError: a column is missing, or a value is not what the head needs; the message names
            file and line.
    """
    columns = task.splits[split].columns or task.columns
    build = _BUILDERS[task.head]
    labelled, classes = is_labelled(split), class_indices(task)
    seen: set[str] = set()
    for record in records:
        row = Row(task, columns, record, classes, labelled=labelled)
        if row.is_skipped():
            continue
        identifier = row.text("id") if row.has("id") else str(len(seen))
        if identifier in seen:
            row.fail(f"id {identifier!r} occurs twice")
        seen.add(identifier)
        yield build(row, identifier)


def _segments(row: Row, identifier: str) -> Example:
    row.require("label")
    return Example(
        id=identifier,
        text=row.filled_text("text"),
        text_pair=row.filled_text("text_pair") if row.has("text_pair") else None,
        label=row.class_index(row.raw("label")) if row.has("label") else None,
        group=row.text("group") if row.has("group") else "",
    )


def _scored_segments(row: Row, identifier: str) -> Example:
    row.require("label")
    return Example(
        id=identifier,
        text=row.filled_text("text"),
        text_pair=row.filled_text("text_pair") if row.has("text_pair") else None,
        label=_score(row) if row.has("label") else None,
    )


def _score(row: Row) -> float | None:
    value = row.raw("label")
    low, high = row.task.label_range or (-math.inf, math.inf)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        row.fail(f"score {value!r} is not a number")
    try:
        # Unlike ``float``, without underscores and other scripts' digits.
        is_number = not isinstance(value, str) or _NUMBER.fullmatch(value)
        score = float(value) if is_number else math.nan
    except OverflowError:
        score = math.nan
    if row.is_hidden(value) and not low <= score <= high:
        return None
    if not math.isfinite(score):
        row.fail(f"score {value!r} is not a number")
    if not low <= score <= high:
        row.fail(f"score {value} is not in {low:g}..{high:g}")
    return score


def _words(row: Row, identifier: str) -> Example:
    row.require("tags")
    words = row.texts("words")
    if not words or not all(word.strip() for word in words):
        row.fail("the sentence has no words" if not words else "a word is empty")
    tags: tuple[int, ...] = ()
    if row.has("tags"):
        indices = [row.class_index(tag, word) for word, tag in enumerate(_tags(row))]
        tags = tuple(index for index in indices if index is not None)
    if len(tags) != len(words) and (row.labelled or tags):
        row.fail(f"{len(tags)} labels for {len(words)} words")
    return Example(id=identifier, words=words, tags=tags, breaks=row.breaks())


def _tags(row: Row) -> list[Any]:
    tags = row.raw("tags")
    if isinstance(tags, str):
        return split_words(tags)
    if not isinstance(tags, list):
        row.fail(f"tags are {kind_of(tags)}, not a list")
    return tags


def _choices(row: Row, identifier: str) -> Example:
    row.require("label")
    choices = row.texts("choices")
    if len(choices) < 2:
        row.fail(f"{len(choices)} choices; at least 2 are needed")
    if not all(choice.strip() for choice in choices):
        row.fail("a choice is empty")
    question = row.text("question") if row.has("question") else ""
    return Example(
        id=identifier,
        text=row.filled_text("text") if row.has("text") else "",
        choices=tuple(f"{question} {choice}".strip() for choice in choices),
        label=_choice_label(row, len(choices)) if row.has("label") else None,
        group=row.text("group") if row.has("group") else "",
    )


def _choice_label(row: Row, choices: int) -> int | None:
    value = row.raw("label")
    if row.task.labels:
        label = row.class_index(value)
    else:
        text = written_label(value)
        label = whole_number(text)
        if label is None and not row.is_hidden(value):
            row.fail(f"label {text!r} is not the number of a choice, from 0")
    if label is not None and label >= choices:
        row.fail(f"label {written_label(value)!r} is beyond the {choices} choices")
    return label


def _spans(row: Row, identifier: str) -> Example:
    context = row.filled_text("context")
    answers: tuple[Answer, ...] | None = None
    if row.has("answer_text"):
        answers = _answer_in_columns(row, context)
    elif row.has("answers"):
        answers = answers_in(row.fail, row.raw("answers"), context)
    if row.labelled and not answers and not row.task.unanswerable:
        row.fail("the question has no answer; set unanswerable for data such as SQuAD 2.0")
    return Example(
        id=identifier,
        text=row.filled_text("question"),
        text_pair=context,
        answers=answers,
        candidates=answers_in(row.fail, row.raw("candidates"), context)
        if row.has("candidates")
        else (),
    )


def _answer_in_columns(row: Row, context: str) -> tuple[Answer, ...]:
    """Return the answer of a table; without ``answer_start`` it is the first occurrence."""
    text = row.text("answer_text")
    if not text.strip():
        return ()
    places = (context.find(form) for form in _unicode_forms(text))
    start: Any = next((place for place in places if place >= 0), -1)
    if row.has("answer_start"):
        start = whole_number(written_label(row.raw("answer_start")))
    elif start < 0:
        row.fail(f"answer {text[:40]!r} does not occur in the passage")
    return answers_in(row.fail, [{"text": text, "answer_start": start}], context)


def answers_in(report: Callable[[str], Any], value: Any, context: str) -> tuple[Answer, ...]:
    """Check answers.

    Args:
        report: raises an error with a message.
        value: a list of objects with ``text`` and ``answer_start``, as in SQuAD's files, or one
            object of two lists, as ``datasets`` has it.
        context: the passage that the answers stand in.
    """
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start")
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            report("answers: text and answer_start are not lists of equal length")
            return ()
        value = [{"text": t, "answer_start": s} for t, s in zip(texts, starts, strict=True)]
    if not isinstance(value, list):
        report(f"answers are {kind_of(value)}, not a list")
        return ()
    return tuple(_answer_in(report, item, context) for item in value)


def _answer_in(report: Callable[[str], Any], value: Any, context: str) -> Answer:
    text = value.get("text") if isinstance(value, dict) else None
    start = value.get("answer_start") if isinstance(value, dict) else None
    if not isinstance(text, str) or type(start) is not int:
        report("an answer needs text (a string) and answer_start (an integer)")
        return Answer("", 0)
    if not text.strip():
        report("an answer is empty")
    # Of texts that differ only in their Unicode form, the passage's is used.
    text = next(
        (form for form in _unicode_forms(text) if start >= 0 and context.startswith(form, start)),
        text,
    )
    found = context[max(start, 0) : max(start, 0) + len(text)]
    if start < 0 or found != text:
        report(
            f"answer {text[:40]!r} is not at character {start} of the passage, "
            f"where {found[:40]!r} is"
        )
    return Answer(text, start)


def _unicode_forms(text: str) -> tuple[str, ...]:
    """Return a text as given, composed and decomposed."""
    return text, unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text)


_BUILDERS: Mapping[str, Callable[[Row, str], Example]] = {
    "classification": _segments,
    "regression": _scored_segments,
    "spans": _spans,
    "tokens": _words,
    "choices": _choices,
}

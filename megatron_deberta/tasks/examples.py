"""Labelled examples, the common form of all formats, and how they are built from records."""

from __future__ import annotations

import json
import math
import random
import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_deberta.errors import DataError
from megatron_deberta.tasks.records import Place, Record, kind_of, whole_number
from megatron_deberta.tasks.task import SCORE_HEADS, TaskConfig, is_labelled, task_names


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer span: ``text`` is ``context[start : start + len(text)]``."""

    text: str
    start: int

    @property
    def end(self) -> int:
        """Offset after the last character."""
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One labelled example; unused fields keep their defaults.

    Attributes:
        id: identifier in prediction files.
        text: first segment; for spans the question.
        text_pair: second segment, or None; for spans the passage.
        words: words to label (tokens).
        choices: second segments, one per choice (choices) or passage (rerank); a text that does
            not match (embed).
        label: class index, score or index of the right choice; None: unlabelled.
        tags: class index per word (tokens); for each of the task's labels, in its order, 1 if the
            example has it, else 0 (multilabel); empty: unlabelled.
        breaks: indices of words that begin a sentence, other than the first (tokens); empty: the
            words are one sentence.
        answers: correct spans of ``text_pair`` (spans); empty: unanswerable; None: unlabelled.
        candidates: the only spans that may be predicted (ReCoRD's entities); empty: any.
        group: name of the group that group metrics refer to, such as a MultiRC question.
        relevance: of each passage, 0 or more (rerank); empty: unlabelled.
    """

    id: str
    text: str = ""
    text_pair: str | None = None
    words: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    label: int | float | None = None
    tags: tuple[int, ...] = ()
    breaks: tuple[int, ...] = ()
    answers: tuple[Answer, ...] | None = None
    candidates: tuple[Answer, ...] = ()
    group: str = ""
    relevance: tuple[float, ...] = ()


_UNLABELLED = ("", "-1", "None")
"""Labels that test files have instead of the hidden ones."""


_FLAGS = {"1": True, "0": False, "true": True, "false": False}


_SHOWN = 50
"""Labels that an error lists."""


_PLAIN_LABEL = re.compile(r"\w[\w.+/-]*")


_SURROGATE = re.compile("[\ud800-\udfff]")


_WHITE_SPACE = re.compile(r"[ \t\r\n\f\v]+")


_OPTIONAL = ("label", "labels", "tags", "answers", "answer_text", "answer_start", "negative")
"""Roles that files may lack where labels are optional."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction for one example.

    Attributes:
        id: identifier of the example.
        index: class index, or index of the choice or of the best passage; -1 for other heads.
        value: label as written in the files, labels of the example, score, answer text (empty: no
            answer), or a label per word; of embeddings, the cosine of a pair (empty: of a text
            alone).
        probabilities: one per class, label or choice; of tokens, of each word's label; of rerank,
            the score of each passage; empty for other heads.
        null_score: spans: score of no answer minus that of the best answer.
        group: the example's group.
        windows: rows that the example's text was predicted in; 0: unknown, or choices.
        truncated: a part of the text was in no row.
        embedding: of a text alone; empty for other heads.
    """

    id: str
    index: int = -1
    value: str | float | tuple[str, ...]
    probabilities: tuple[float, ...] = ()
    null_score: float = 0.0
    group: str = ""
    windows: int = 0
    truncated: bool = False
    embedding: tuple[float, ...] = ()


def sentences(example: Example, values: tuple[str, ...]) -> list[list[str]]:
    """Split values per word at the sentence breaks of an example."""
    borders = [0, *example.breaks, len(values)]
    return [list(values[a:b]) for a, b in zip(borders, borders[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A record with the roles of its columns.

    Attributes:
        task: the task.
        columns: column, template or list of columns by role.
        record: the record.
        classes: index of each label in its composed Unicode form.
        labelled: whether labels are required.
        label_remedy: returns what to do about an unknown label, as the end of a message.
    """

    task: TaskConfig
    columns: Mapping[str, Any]
    record: Record
    classes: Mapping[str, int]
    labelled: bool
    label_remedy: Callable[[], str]

    def fail(self, problem: str) -> NoReturn:
        """Raise a ``DataError`` that names file and line."""
        self.record.place.fail(problem)

    def is_skipped(self) -> bool:
        """Return whether the record's label is one of those to skip."""
        if not self.task.skip_labels or not self.has("label"):
            return False
        return any(
            spelling in self.task.skip_labels
            for label in self.label_values()
            for spelling in _spellings(label)
        )

    def has(self, role: str) -> bool:
        """Return whether the role has a column; for optional labels, whether the file has it."""
        name = self.columns.get(role)
        if name is None:
            return False
        names = name if isinstance(name, list) else [name]
        return self.labelled or role not in _OPTIONAL or all(n in self.record.values for n in names)

    def holds(self, role: str) -> bool:
        """Return whether the role has a column that this record has."""
        value: Any = self.record.values
        for part in self._path(str(self.columns.get(role))):
            value = value.get(part) if isinstance(value, dict) else None
        return value is not None

    def require(self, role: str) -> None:
        """Check that a role has a column where labels are not optional.

        Raises:
            DataError: it has none.
        """
        if self.labelled and role not in self.columns:
            self.fail(f"columns: no column is named as {role}")

    def raw(self, role: str) -> Any:
        """Return the value of a role's column."""
        return self._value(str(self.columns[role]))

    def label_values(self) -> list[Any]:
        """Return the label; of multilabel, all labels, which is a list with None if not known."""
        column = self.columns["label"]
        if self.task.head != "multilabel":
            return [self.raw("label")]
        if isinstance(column, list):
            pairs = zip(self.task.labels, column, strict=True)
            return [found for label, name in pairs if (found := self._flagged(label, name)) != ""]
        value = self.raw("label")
        if isinstance(value, str):
            parts = [part.strip() for part in value.split(self.task.label_separator)]
            return [part for part in parts if part]
        return value if isinstance(value, list) else [value]

    def _flagged(self, label: str, name: Any) -> str | None:
        """Return the label if its column has a 1, empty for a 0, None if that is not known."""
        value = self._value(str(name))
        flag = written_label(value).lower()
        if flag not in _FLAGS and not self.is_hidden(value):
            self.fail(f"{name!r} is {value!r}; write 1 where the example has the label, else 0")
        return None if flag not in _FLAGS else label if _FLAGS[flag] else ""

    def text(self, role: str) -> str:
        """Return the text of a role: a column, or a template filled with columns."""
        return self._text_of(self.columns[role])

    def filled_text(self, role: str) -> str:
        """Return the text of a role, which may not be blank."""
        text = self.text(role)
        if not text.strip():
            self.fail(f"{role} is empty")
        return text

    def texts(self, role: str) -> tuple[str, ...]:
        """Return the texts of several columns, or of one column that holds a list.

        The words of a sentence may also be a string that has spaces between them, and one positive
        or negative passage a string.
        """
        name = self.columns[role]
        if isinstance(name, list):
            return tuple(self._text_of(item) for item in name)
        value = self._value(str(name))
        if isinstance(value, str) and role == "words":
            value = split_words(value)
        elif isinstance(value, str) and role in ("positives", "negatives"):
            value = [value]
        if not isinstance(value, list):
            self.fail(f"{name!r} is {kind_of(value)}, not a list")
        for item in value:
            if not isinstance(item, str):
                self.fail(f"{name!r} contains {kind_of(item)}, not a string")
        return tuple(value)

    def class_index(self, value: Any, word: int = 0) -> int | None:
        """Return the index of a label; None for the placeholder of a hidden one.

        Args:
            value: the label.
            word: index of its word, whose line an error names if the file has a line per word.
        """
        # Files of words have many labels, nearly all of them written as in the task.
        if isinstance(value, str) and (index := self.classes.get(value)) is not None:
            return index
        for label in _spellings(value):
            if (index := self.classes.get(unicodedata.normalize("NFC", label))) is not None:
                return index
        if self.is_hidden(value):
            return None
        lines = self.record.values.get("lines") if self.task.reader == "conll" else None
        place = Place(self.record.place.path, lines[word]) if lines else self.record.place
        known = ", ".join(self.task.labels[:_SHOWN])
        more = f" and {len(self.task.labels) - _SHOWN:,} more" * (len(self.task.labels) > _SHOWN)
        place.fail(
            f"label {written_label(value)!r} is not one of {known}{more}{self.label_remedy()}"
        )

    def is_hidden(self, value: Any) -> bool:
        """Return whether a label is the placeholder of one that is not published."""
        return not self.labelled and (_is_missing(value) or written_label(value) in _UNLABELLED)

    def breaks(self) -> tuple[int, ...]:
        """Return the words that begin a sentence, other than the first, in a merged document."""
        return tuple(self.record.values.get("breaks", ()))

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
        if (
            isinstance(value, bool)
            or not isinstance(value, (str, int, float))
            or _is_missing(value)
        ):
            self.fail(f"{name!r} is {kind_of(value)}, not a string")
        text = str(value)
        return self.task.values.get(name, {}).get(text, text)

    def _value(self, name: str) -> Any:
        value: Any = self.record.values
        for part in self._path(name):
            if not isinstance(value, dict) or part not in value:
                there = ", ".join(map(repr, list(self.record.values)[:12]))
                self.fail(f"no column {name!r} (there are {there})")
            value = value[part]
        if self._has_surrogate(value):
            self.fail(f"{name!r} has an unpaired surrogate, which is half of a character")
        return value

    def _path(self, name: str) -> list[str]:
        # A name that contains a full stop is tried before the path that it could be.
        return [name] if name in self.record.values else name.split(".")

    def _has_surrogate(self, value: Any) -> bool:
        if isinstance(value, str):
            return not value.isascii() and _SURROGATE.search(value) is not None
        parts = value.values() if isinstance(value, dict) else value
        return isinstance(value, dict | list) and any(map(self._has_surrogate, parts))


def split_words(text: str) -> list[str]:
    """Split at white space of ASCII; other white space, such as no-break spaces, is text."""
    return [word for word in _WHITE_SPACE.split(text) if word]


def _spellings(value: Any) -> tuple[str, ...]:
    """Return the texts that a task file may have for a label; a missing value has none."""
    if _is_missing(value):
        return ()
    if isinstance(value, (bool, float)):
        return written_label(value), str(value)
    return (str(value),)


def _is_missing(value: Any) -> bool:
    """Tell whether a value is null, which tables of numbers write as NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def written_label(value: Any) -> str:
    """Write a label as text files do: 1, true."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")


def build_examples(
    task: TaskConfig, split: str, read: Callable[[], Iterable[Record]]
) -> Iterator[Example]:
    """Build the examples of a split.

    Args:
        task: the task.
        split: name of the split.
        read: returns the records of its files; called again to list the labels in an error.

    Raises:
        DataError: a column is missing, or a value is not what the head needs; the message names
            file and line.
    """
    columns = task.splits[split].columns or task.columns
    build = _BUILDERS.get(task.head, _segments)
    labelled = is_labelled(split)
    classes = {unicodedata.normalize("NFC", label): i for i, label in enumerate(task.labels)}

    def as_row(record: Record) -> Row:
        return Row(
            task=task,
            columns=columns,
            record=record,
            classes=classes,
            labelled=labelled,
            label_remedy=remedy,
        )

    def remedy() -> str:
        return _label_remedy(task, map(as_row, read()))

    seen: set[str] = set()
    for row in map(as_row, read()):
        if row.is_skipped():
            continue
        identifier = row.text("id") if row.has("id") else str(len(seen))
        if identifier in seen:
            row.fail(f"id {identifier!r} occurs twice")
        seen.add(identifier)
        yield build(row, identifier)


def _label_remedy(task: TaskConfig, rows: Iterable[Row]) -> str:
    """Return the labels of a split as a line of a task file; empty if the task is a packaged one.

    Args:
        task: the task.
        rows: of the split.
    """
    is_custom = task.name.startswith("custom_")
    if task.name in task_names() and not is_custom:
        return ""
    found: set[str] = set()
    # What follows may have another fault, which is reported after this one.
    with suppress(DataError):
        for row in rows:
            if row.has("tags"):
                found.update(map(written_label, _tags(row)))
            elif row.has("label") and not row.is_skipped():
                found.update(s for label in row.label_values() for s in _spellings(label)[:1])
    labels = sorted(found - {""})
    # A label that YAML would read as something else than text, or as several, is quoted.
    parts = [
        label if _PLAIN_LABEL.fullmatch(label) else json.dumps(label, ensure_ascii=False)
        for label in labels[:_SHOWN]
    ]
    rest = f", and {len(labels) - _SHOWN:,} more" * (len(labels) > _SHOWN)
    listed = f"labels: [{', '.join(parts) or '...'}{rest}]"
    if is_custom:
        return f"; list yours as {listed} in a task file with base: configs/tasks/{task.name}.yaml"
    return f"; the data has {listed}"


def _segments(row: Row, identifier: str) -> Example:
    row.require("text_pair" if row.task.head == "embed" else "label")
    has_label, is_multilabel = row.has("label"), row.task.head == "multilabel"
    pair = row.filled_text("text_pair") if row.has("text_pair") else None
    return Example(
        id=identifier,
        text=row.filled_text("text"),
        text_pair=pair,
        choices=(row.filled_text("negative"),) if pair and row.has("negative") else (),
        label=_label(row) if has_label and not is_multilabel else None,
        tags=_flags(row) if has_label and is_multilabel else (),
        group=row.text("group") if row.has("group") else "",
    )


def _flags(row: Row) -> tuple[int, ...]:
    """Return 1 or 0 for each label of the task; empty: the labels are hidden."""
    indices = {row.class_index(label) for label in row.label_values()}
    return () if None in indices else tuple(int(i in indices) for i in range(len(row.task.labels)))


def _label(row: Row) -> float | None:
    value = row.raw("label")
    if row.task.head in SCORE_HEADS:
        return _number(row, value, *row.task.label_range or (-math.inf, math.inf))
    return row.class_index(value)


def _number(row: Row, value: Any, low: float, high: float) -> float | None:
    """Return a number of a file; None for the placeholder of a hidden one."""
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
    if row.task.hypothesis:
        choices = hypotheses(row.task)
    else:
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


def hypotheses(task: TaskConfig) -> tuple[str, ...]:
    """Return the sentence of each label of a task with ``hypothesis``."""
    return tuple(task.hypothesis.replace("{}", name) for name in task.label_names or task.labels)


def _passages(row: Row, identifier: str) -> Example:
    passages: list[str] = []
    relevance: list[float] = []
    if row.holds("passages"):
        passages += row.texts("passages")
        if row.holds("labels"):
            relevance += _relevance(row, len(passages))
        elif row.labelled:
            row.fail("the passages have no labels; give a list of numbers, one per passage")
    for role, value in (("positives", 1.0), ("negatives", 0.0)):
        if row.holds(role):
            found = row.texts(role)
            passages += found
            relevance += [value] * len(found)
    if len(relevance) < len(passages):
        relevance = []  # That of the others is hidden.
    if not passages or not all(passage.strip() for passage in passages):
        row.fail(
            "a passage is empty"
            if passages
            else "the query has no passages; columns.passages or columns.positives names them"
        )
    most = row.task.max_passages
    if row.labelled and 0 < most < len(passages):
        kept = _drawn(row.task, identifier, relevance)
        passages, relevance = [passages[n] for n in kept], [relevance[n] for n in kept]
    return Example(
        id=identifier,
        text=row.filled_text("query"),
        choices=tuple(passages),
        relevance=tuple(relevance),
        group=row.text("group") if row.has("group") else "",
    )


def _relevance(row: Row, passages: int) -> list[float]:
    """Return the relevance of passages; empty: it is hidden."""
    values = row.raw("labels")
    if not isinstance(values, list) or len(values) != passages:
        found = len(values) if isinstance(values, list) else kind_of(values)
        row.fail(f"labels: {found} for {passages} passages; give a list, one number per passage")
    numbers = [_number(row, value, 0.0, math.inf) for value in values]
    known = [number for number in numbers if number is not None]
    return known if len(known) == passages else []


def _drawn(task: TaskConfig, identifier: str, relevance: Sequence[float]) -> list[int]:
    """Return the passages of a query that are kept, in their order: first the relevant ones.

    At least one other passage is among them, without which the query would teach nothing.
    """
    # Of `random`, only seeding and this method are the same in all versions of Python.
    draw = random.Random(f"{task.passage_seed} {identifier}").random
    order = sorted(range(len(relevance)), key=lambda _: draw())
    others = [n for n in order if not relevance[n]]
    relevant = [n for n in order if relevance[n]][: task.max_passages - bool(others)]
    return sorted(relevant + others[: task.max_passages - len(relevant)])


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
        answers = answers_in(row, row.raw("answers"), context)
    if row.labelled and not answers and not row.task.unanswerable:
        row.fail("the question has no answer; set unanswerable for data such as SQuAD 2.0")
    return Example(
        id=identifier,
        text=row.filled_text("question"),
        text_pair=context,
        answers=answers,
        candidates=answers_in(row, row.raw("candidates"), context) if row.has("candidates") else (),
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
    return answers_in(row, [{"text": text, "answer_start": start}], context)


def answers_in(row: Row, value: Any, context: str) -> tuple[Answer, ...]:
    """Check answers.

    Args:
        row: the record that has them.
        value: a list of objects with ``text`` and ``answer_start``, as in SQuAD's files, or one
            object of two lists, as ``datasets`` has it.
        context: the passage that the answers stand in.
    """
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start")
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            row.fail("answers: text and answer_start are not lists of equal length")
        value = [{"text": t, "answer_start": s} for t, s in zip(texts, starts, strict=True)]
    if not isinstance(value, list):
        row.fail(f"answers are {kind_of(value)}, not a list")
    return tuple(_answer_in(row, item, context) for item in value)


def _answer_in(row: Row, value: Any, context: str) -> Answer:
    given = value if isinstance(value, dict) else {}
    text, start = given.get("text"), given.get("answer_start")
    if not isinstance(text, str) or type(start) is not int:
        row.fail("an answer needs text (a string) and answer_start (an integer)")
    if not text.strip():
        row.fail("an answer is empty")
    # Of texts that differ only in their Unicode form, the passage's is used.
    forms = _unicode_forms(text) if start >= 0 else ()
    found = next((form for form in forms if context.startswith(form, start)), None)
    if found is None:
        there = context[max(start, 0) : max(start, 0) + len(text)]
        row.fail(
            f"answer {text[:40]!r} is not at character {start} of the passage, "
            f"where {there[:40]!r} is"
        )
    return Answer(found, start)


def _unicode_forms(text: str) -> tuple[str, ...]:
    """Return a text as given, composed and decomposed."""
    return text, unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text)


_BUILDERS: Mapping[str, Callable[[Row, str], Example]] = {
    "spans": _spans, "tokens": _words, "choices": _choices, "rerank": _passages,
}  # fmt: skip
"""Builders of the heads whose examples are not one or two texts with a label."""

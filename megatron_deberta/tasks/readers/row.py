"""A record of a data file, with its values read by the columns in the task's config."""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections.abc import Mapping
from typing import Any, NoReturn

from megatron_deberta.tasks.readers.records import Place, Record, kind_of
from megatron_deberta.tasks.task import TaskConfig

_UNLABELLED = ("", "-1", "None")
"""Labels that test files have instead of the hidden ones."""
_SHOWN = 50
"""Labels that an error lists."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_WHITE_SPACE = re.compile(r"[ \t\r\n\f\v]+")
_OPTIONAL = ("label", "tags", "answers", "answer_text", "answer_start")
"""Roles that files may lack where labels are optional."""


class Row:
    """A record with the roles of its columns.

    Args:
        task: the task.
        columns: column, template or list of columns by role.
        record: the record.
        classes: index of each label in its composed form, as `class_indices` returns it.
        labelled: whether labels are required.

    Attributes:
        task: see above.
        labelled: see above.
    """

    def __init__(
        self,
        task: TaskConfig,
        columns: Mapping[str, Any],
        record: Record,
        classes: Mapping[str, int],
        *,
        labelled: bool,
    ) -> None:
        """See the class."""
        self.task = task
        self.labelled = labelled
        self._columns = columns
        self._classes = classes
        self._place, self._values = record

    def fail(self, problem: str) -> NoReturn:
        """Raise a ``DataError`` that names file and line."""
        self._place.fail(problem)

    def is_skipped(self) -> bool:
        """Return whether the record's label is one of those to skip."""
        if not self.task.skip_labels or not self.has("label"):
            return False
        return any(label in self.task.skip_labels for label in _spellings(self.raw("label")))

    def has(self, role: str) -> bool:
        """Return whether the role has a column; for optional labels, whether the file has it."""
        name = self._columns.get(role)
        if name is None:
            return False
        return self.labelled or role not in _OPTIONAL or name in self._values

    def require(self, role: str) -> None:
        """Check that a role has a column where labels are not optional.

        Raises:
            DataError: it has none.
        """
        if self.labelled and role not in self._columns:
            self.fail(f"columns: no column is named as {role}")

    def raw(self, role: str) -> Any:
        """Return the value of a role's column."""
        return self._value(str(self._columns[role]))

    def text(self, role: str) -> str:
        """Return the text of a role: a column, or a template filled with columns."""
        return self._text_of(self._columns[role])

    def filled_text(self, role: str) -> str:
        """Return the text of a role, which may not be blank."""
        text = self.text(role)
        if not text.strip():
            self.fail(f"{role} is empty")
        return text

    def texts(self, role: str) -> tuple[str, ...]:
        """Return the texts of several columns, or of one column that holds a list.

        The words of a sentence may also be a string that has spaces between them.
        """
        name = self._columns[role]
        if isinstance(name, list):
            return tuple(self._text_of(item) for item in name)
        value = self._value(str(name))
        if isinstance(value, str) and role == "words":
            value = split_words(value)
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
        if isinstance(value, str) and (index := self._classes.get(value)) is not None:
            return index
        for label in _spellings(value):
            if (index := self._classes.get(unicodedata.normalize("NFC", label))) is not None:
                return index
        if self.is_hidden(value):
            return None
        lines = self._values.get("lines") if self.task.reader == "conll" else None
        place = Place(self._place.path, lines[word]) if lines else self._place
        name = self.task.name
        remedy = (
            f"; list yours as labels: [...] in a task file with base: configs/tasks/{name}.yaml"
        )
        known = ", ".join(self.task.labels[:_SHOWN])
        more = f" and {len(self.task.labels) - _SHOWN:,} more" * (len(self.task.labels) > _SHOWN)
        place.fail(
            f"label {written_label(value)!r} is not one of {known}{more}"
            f"{remedy if name.startswith('custom_') else ''}"
        )

    def is_hidden(self, value: Any) -> bool:
        """Return whether a label is the placeholder of one that is not published."""
        return not self.labelled and (_is_missing(value) or written_label(value) in _UNLABELLED)

    def breaks(self) -> tuple[int, ...]:
        """Return the words that begin a sentence, other than the first, in a merged document."""
        return tuple(self._values.get("breaks", ()))

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
        value: Any = self._values
        # A name that contains a full stop is tried before the path that it could be.
        for part in [name] if name in self._values else name.split("."):
            if not isinstance(value, dict) or part not in value:
                there = ", ".join(map(repr, list(self._values)[:12]))
                self.fail(f"no column {name!r} (there are {there})")
            value = value[part]
        if self._has_surrogate(value):
            self.fail(f"{name!r} has an unpaired surrogate, which is half of a character")
        return value

    def _has_surrogate(self, value: Any) -> bool:
        if isinstance(value, str):
            return not value.isascii() and _SURROGATE.search(value) is not None
        parts = value.values() if isinstance(value, dict) else value
        return isinstance(value, dict | list) and any(map(self._has_surrogate, parts))


def class_indices(task: TaskConfig) -> dict[str, int]:
    """Return the class of each label, by the label in its composed Unicode form."""
    return {unicodedata.normalize("NFC", label): i for i, label in enumerate(task.labels)}


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

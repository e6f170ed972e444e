"""Labelled examples, the common form of all readers."""

from __future__ import annotations

from dataclasses import dataclass


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
        choices: second segments, one per choice (choices).
        label: class index, score or index of the right choice; None: unlabelled.
        tags: class index per word (tokens); empty: unlabelled.
        breaks: indices of words that begin a sentence, other than the first (tokens); empty: the
            words are one sentence.
        answers: correct spans of ``text_pair`` (spans); empty: unanswerable; None: unlabelled.
        candidates: the only spans that may be predicted (ReCoRD's entities); empty: any.
        group: name of the group that group metrics refer to, such as a MultiRC question.
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

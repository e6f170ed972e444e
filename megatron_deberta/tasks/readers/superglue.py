"""SuperGLUE files that need more than columns: MultiRC, WiC and WSC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_deberta.tasks.readers.records import (
    Place,
    Record,
    integer_of,
    list_of,
    string_of,
    value_of,
)
from megatron_deberta.tasks.readers.tables import read_jsonl

_POSSESSIVE = ("his", "their", "its", "my", "your", "our")
"""Pronouns that a name with 's replaces ("her" is either, and counts as an object)."""


def read_multirc(path: Path) -> Iterator[Record]:
    """Read MultiRC: one record per answer of each question.

    Yields:
        Records with ``passage``, ``question``, ``answer``, ``label`` if known, ``id`` (passage,
        question and answer) and ``group`` (passage and question).

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    for place, values in read_jsonl(path):
        passage = value_of(place, values, "passage")
        text = string_of(place, passage, "text")
        for question in list_of(place, passage, "questions"):
            group = f"{integer_of(place, values, 'idx')}-{integer_of(place, question, 'idx')}"
            for answer in list_of(place, question, "answers"):
                record = {
                    "passage": text,
                    "question": string_of(place, question, "question"),
                    "answer": string_of(place, answer, "text"),
                    "id": f"{group}-{integer_of(place, answer, 'idx')}",
                    "group": group,
                }
                if "label" in answer:
                    record["label"] = answer["label"]
                yield Record(place, record)


def read_wic(path: Path) -> Iterator[Record]:
    """Read WiC.

    Yields:
        The file's records with ``marked1`` and ``marked2``, the sentences with the word in
        quotation marks.

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    for place, values in read_jsonl(path):
        marked = {f"marked{n}": _marked(place, values, n) for n in (1, 2)}
        yield Record(place, {**values, **marked})


def _marked(place: Place, values: dict[str, object], number: int) -> str:
    sentence = string_of(place, values, f"sentence{number}")
    start = integer_of(place, values, f"start{number}")
    end = integer_of(place, values, f"end{number}")
    if not 0 <= start < end <= len(sentence):
        place.fail(f"word {start}..{end} is not in sentence{number}, of {len(sentence)} characters")
    return f'{sentence[:start]}"{sentence[start:end]}"{sentence[end:]}'


def read_wsc(path: Path) -> Iterator[Record]:
    """Read WSC.

    Yields:
        The file's records with ``marked``, the text with the pronoun between asterisks, and
        ``replaced``, the text with the candidate instead of the pronoun.

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    for place, values in read_jsonl(path):
        target = value_of(place, values, "target")
        words = string_of(place, values, "text").split()
        pronoun = string_of(place, target, "span2_text")
        candidate = string_of(place, target, "span1_text").strip(" ,.;:!?")
        at = integer_of(place, target, "span2_index")
        if not 0 <= at < len(words):
            place.fail(f"span2_index {at} is not one of the {len(words)} words")
        word = words[at]
        found = word.lower().find(pronoun.lower())
        if found < 0:
            place.fail(f"word {at} is {word!r}, not the pronoun {pronoun!r}")
        if pronoun.lower() in _POSSESSIVE:
            candidate += "'s"
        before, after = word[:found], word[found + len(pronoun) :]
        versions = {
            "marked": f"{before}*{word[found : found + len(pronoun)]}*{after}",
            "replaced": f"{before}{candidate}{after}",
        }
        texts = {
            name: " ".join([*words[:at], version, *words[at + 1 :]])
            for name, version in versions.items()
        }
        yield Record(place, {**values, **texts})

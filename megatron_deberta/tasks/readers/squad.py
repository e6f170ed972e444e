"""SQuAD 1.1 and 2.0 (JSON), and ReCoRD (JSON Lines)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from megatron_deberta.tasks.readers.records import (
    Place,
    Record,
    integer_of,
    kind_of,
    list_of,
    read_text,
    string_of,
    value_of,
)
from megatron_deberta.tasks.readers.tables import parse_json, read_jsonl


def read_squad(path: Path) -> Iterator[Record]:
    """Read a SQuAD file.

    Yields:
        Records with ``question``, ``context``, ``id``, ``title`` and, if the file has them,
        ``answers``; impossible questions have none.

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    text = read_text(path)
    document = parse_json(path, text)

    def at(*steps: str | int) -> Place:
        return Place(path, partial(line_of, text, steps))

    for a, article in enumerate(list_of(at(), document, "data")):
        for p, paragraph in enumerate(list_of(at("data", a), article, "paragraphs")):
            place = at("data", a, "paragraphs", p)
            context = string_of(place, paragraph, "context")
            for q, question in enumerate(list_of(place, paragraph, "qas")):
                place = at("data", a, "paragraphs", p, "qas", q)
                yield Record(place, _question(place, question, context, article))


def _question(place: Place, question: Any, context: str, article: Any) -> dict[str, Any]:
    identifier = value_of(place, question, "id")
    if not isinstance(identifier, (str, int)):
        place.fail(f"'id' is {kind_of(identifier)}, not a string")
    values: dict[str, Any] = {
        "question": string_of(place, question, "question"),
        "context": context,
        "id": str(identifier),
        "title": str(article.get("title", "")),
    }
    is_impossible = question.get("is_impossible", False)
    if not isinstance(is_impossible, bool):
        place.fail(f"'is_impossible' is {kind_of(is_impossible)}, not true or false")
    if is_impossible:
        if question.get("answers"):
            place.fail("'is_impossible' is true, but there are answers")
        values["answers"] = []
    elif "answers" in question:
        values["answers"] = question["answers"]
    return values


def line_of(text: str, steps: Sequence[str | int]) -> int:
    """Return the line where a value of a JSON document begins; the document is valid.

    Args:
        text: the document.
        steps: keys and indices that lead to the value.
    """
    skip = json.JSONDecoder().scan_once  # type: ignore[attr-defined]

    def after_space(position: int) -> int:
        while text[position] in " \t\n\r":
            position += 1
        return position

    position = after_space(0)
    for step in steps:
        # Past the bracket, then past members and their commas until the one wanted.
        position = after_space(position + 1)
        if isinstance(step, int):
            for _ in range(step):
                _, position = skip(text, position)
                position = after_space(after_space(position) + 1)
            continue
        while True:
            key, position = scanstring(text, position + 1)
            position = after_space(after_space(position) + 1)
            if key == step:
                break
            _, position = skip(text, position)
            position = after_space(after_space(position) + 1)
    return text.count("\n", 0, position) + 1


def read_record(path: Path) -> Iterator[Record]:
    """Read ReCoRD as SuperGLUE publishes it; the ends of its spans are inclusive.

    Yields:
        One record per query, with ``query``, ``passage``, ``id``, ``candidates`` (the passage's
        entities) and, if the file has them, ``answers``.

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    for place, values in read_jsonl(path):
        passage = value_of(place, values, "passage")
        text = string_of(place, passage, "text")
        candidates = [_span(place, text, item) for item in list_of(place, passage, "entities")]
        for query in list_of(place, values, "qas"):
            record = {
                "query": string_of(place, query, "query"),
                "passage": text,
                "id": str(integer_of(place, query, "idx")),
                "candidates": candidates,
            }
            if "answers" in query:
                record["answers"] = [
                    _span(place, text, item) for item in list_of(place, query, "answers")
                ]
            yield Record(place, record)


def _span(place: Place, text: str, item: Any) -> dict[str, Any]:
    start, end = integer_of(place, item, "start"), integer_of(place, item, "end") + 1
    if not 0 <= start < end <= len(text):
        place.fail(f"span {start}..{end - 1} is not in the passage of {len(text)} characters")
    return {"text": item.get("text", text[start:end]), "answer_start": start}

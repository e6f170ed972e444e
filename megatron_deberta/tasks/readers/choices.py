"""Reading comprehension with choices: RACE (JSON files), QuAIL and COPA (XML)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from megatron_deberta.errors import MalformedInputError
from megatron_deberta.tasks.readers.records import (
    Place,
    Record,
    kind_of,
    list_of,
    read_bytes,
    require_below,
    string_of,
    whole_number,
)
from megatron_deberta.tasks.readers.tables import read_document, read_jsonl

_MIRRORED = 1000
"""Balanced COPA's mirrored question of item n is item 1000 + n."""


def read_race(path: Path) -> Iterator[Record]:
    """Read a folder of RACE, with its subfolders, or a file of JSON Lines.

    Yields:
        One record per question, with ``article``, ``question``, ``options`` (a list), ``id``,
        ``level`` (the file's folder: middle or high) and, if the file has it, ``answer``.

    Raises:
        DataError: a file is malformed; the message names file and line.
    """
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise MalformedInputError(f"{path}: no .txt files; RACE has train/high/1.txt and so on")
        for file in files:
            require_below(file, path)
        passages = (Record(Place(file, 1), read_document(file)) for file in files)
    else:
        passages = (Record(place, values) for place, values in read_jsonl(path))
    for number, (place, values) in enumerate(passages):
        yield from _race_questions(place, values, number)


def _race_questions(place: Place, values: dict[str, Any], number: int) -> Iterator[Record]:
    article = string_of(place, values, "article")
    questions = list_of(place, values, "questions")
    options = list_of(place, values, "options")
    answers = list_of(place, values, "answers") if "answers" in values else None
    for name, found in (("options", options), ("answers", answers)):
        if found is not None and len(found) != len(questions):
            place.fail(f"{len(found)} {name} for {len(questions)} questions")
    level = place.path.parent.name
    passage = f"{level}-{place.path.stem}" if place.path.suffix == ".txt" else str(number)
    for index, question in enumerate(questions):
        if not isinstance(question, str):
            place.fail(f"question {index + 1} is {kind_of(question)}, not a string")
        record = {
            "article": article,
            "question": question,
            "options": options[index],
            "id": f"{passage}-{index}",
            "level": level,
        }
        if answers is not None:
            record["answer"] = answers[index]
        yield Record(place, record)


def read_quail(path: Path) -> Iterator[Record]:
    """Read QuAIL's XML.

    Yields:
        One record per question, with ``passage``, ``question``, ``options`` (a list), ``answer``
        (index), ``type``, ``text`` (the text's id) and ``id``.

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    root, lines = parse_xml(path)
    for text in root.iter("text"):
        place = Place(path, lines[text])
        name = text.get("id") or place.fail("<text> has no id")
        passage = _content(place, text.find("text_body"), "text_body")
        for question in text.iter("q"):
            place = Place(path, lines[question])
            right = [i for i, a in enumerate(question.iter("a")) if a.get("correct") == "True"]
            if len(right) != 1:
                place.fail(f"{len(right)} answers are correct; there must be one")
            values = {
                "passage": passage,
                "question": _content(place, question, "q"),
                "options": [_content(place, answer, "a") for answer in question.iter("a")],
                "answer": right[0],
                "type": question.get("type", ""),
                "text": name,
                "id": f"{name}-{question.get('id')}",
            }
            yield Record(place, values)


def read_copa_xml(path: Path) -> Iterator[Record]:
    """Read COPA's XML, also that of Balanced COPA.

    Yields:
        Records with ``premise``, ``choice1``, ``choice2``, ``question`` (cause or effect), ``id``,
        ``label`` (1 or 2) if known, and ``group``, the same for a question and its mirror image.

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    root, lines = parse_xml(path)
    for item in root.iter("item"):
        place = Place(path, lines[item])
        number = whole_number(item.get("id", ""))
        if number is None:
            place.fail(f"<item> has the id {item.get('id')!r}, not a number")
        asked = item.get("asks-for")
        if asked not in ("cause", "effect"):
            place.fail(f"asks-for is {asked!r}, not cause or effect")
        values = {
            "premise": _content(place, item.find("p"), "p"),
            "choice1": _content(place, item.find("a1"), "a1"),
            "choice2": _content(place, item.find("a2"), "a2"),
            "question": asked,
            "id": str(number),
            "group": str(number % _MIRRORED),
        }
        if (label := item.get("most-plausible-alternative")) is not None:
            values["label"] = label
        yield Record(place, values)


def _content(place: Place, element: Element | None, tag: str) -> str:
    """Return the text of an element, without white space around it.

    Elements inside it, such as <b>, mark parts of its text; those of <q> are the answers.
    """
    if element is None:
        place.fail(f"no <{tag}> in this element")
    text = ((element.text or "") if tag == "q" else "".join(element.itertext())).strip()
    if not text:
        place.fail(f"<{tag}> is empty")
    return text


def parse_xml(path: Path) -> tuple[Element, dict[Element, int]]:
    """Parse XML; entity declarations, which can expand without bound, are refused.

    Returns:
        The root, and the line of each element.

    Raises:
        DataError: the file is not valid; the message names file and line.
    """
    builder = TreeBuilder()
    parser = expat.ParserCreate()
    lines: dict[Element, int] = {}

    def start(tag: str, attributes: dict[str, str]) -> None:
        lines[builder.start(tag, attributes)] = parser.CurrentLineNumber

    def refuse(*_: object) -> None:
        Place(path, parser.CurrentLineNumber).fail("entity declarations are not allowed")

    parser.StartElementHandler = start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.EntityDeclHandler = refuse
    parser.buffer_text = True
    try:
        parser.Parse(read_bytes(path), True)
    except expat.ExpatError as error:
        Place(path, error.lineno).fail(f"not valid XML: {expat.ErrorString(error.code)}")
    return builder.close(), lines

"""Formats of published data sets: CoNLL, SQuAD, ReCoRD, SuperGLUE, RACE, QuAIL and COPA."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from megatron_deberta.errors import MalformedInputError
from megatron_deberta.tasks.records import (
    Place,
    Record,
    integer_of,
    kind_of,
    list_of,
    numbered_lines,
    parse_json,
    read_bytes,
    read_document,
    read_jsonl,
    read_text,
    require_below,
    string_of,
    value_of,
    whole_number,
)
from megatron_deberta.tasks.task import OUTSIDE, entity_type

DOCUMENT_START = "-DOCSTART-"


def read_conll(path: Path, *, labelled: bool, merge: bool) -> Iterator[Record]:
    """Read sentences.

    The first column is the word, the last one its label. Columns are separated by tabs if a line
    has one, else by spaces. Lines of white space only end a
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
    words: list[str] = []
    tags: list[str] = []
    lines: list[int] = []
    breaks: list[int] = []
    count = width = 0
    in_document = False
    # The end of the file ends the last record as the beginning of another document would.
    for number, line in chain(numbered_lines(read_text(path)), [(0, DOCUMENT_START)]):
        columns = _columns(line)
        is_start = columns[:1] == [DOCUMENT_START]
        if columns and not is_start:
            width = width or len(columns)
            _check_columns(Place(path, number), columns, width, labelled)
            lines.append(number)
            words.append(columns[0])
            tags += columns[-1:] if width > 1 else []
        elif words and not is_start and merge and in_document:
            breaks += [len(words)] if breaks[-1:] != [len(words)] else []
        elif words:
            _refuse_numbers(Place(path, lines[0]), words, width)
            breaks = [at for at in breaks if at < len(words)]
            values = {"words": words, "lines": lines, "id": str(count), "breaks": breaks}
            yield Record(Place(path, lines[0]), {**values, "tags": tags} if tags else values)
            words, tags, lines, breaks, count = [], [], [], [], count + 1
        in_document |= is_start


def with_sentence(record: Record) -> Record:
    """Add ``text``, the words, and ``types``, the distinct types of its entities, to a sentence.

    The type is the part of a label after its position, as in ``B-PER``; O has none.
    """
    place, values = record
    added: dict[str, Any] = {"text": " ".join(values["words"])}
    if "tags" in values:
        added["types"] = sorted({entity_type(tag) for tag in values["tags"] if tag != OUTSIDE})
    return Record(place, values | added)


def _refuse_numbers(place: Place, words: list[str], width: int) -> None:
    """Reject a sentence whose first column counts its words, as in CoNLL-U."""
    counts = ([*map(str, range(first, first + len(words)))] for first in (0, 1))
    if width > 2 and len(words) > 2 and words in counts:
        place.fail(
            "the first column counts the words, but must be the word; remove it: cut -f 2- "
            f"{place.path} > FILE"
        )


def _columns(line: str) -> list[str]:
    """Return the columns of a line; other white space than spaces and tabs is text."""
    stripped = line.strip(" \t")
    if "\t" in stripped:
        return [column.strip(" ") for column in line.rstrip(" \t").split("\t")]
    return [column for column in stripped.split(" ") if column]


def _check_columns(place: Place, columns: list[str], width: int, labelled: bool) -> None:
    if len(columns) != width:
        place.fail(
            f"{len(columns)} columns instead of {width}, as in the first line; expected one word "
            "per line, spaces or a tab, and its label, and an empty line after each sentence"
        )
    if labelled and width < 2:
        place.fail(f"word {columns[0]!r} has no label")
    if not columns[0].strip():
        place.fail("the word is empty")


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


def read_squad_passages(
    path: Path, *, part: Sequence[float] = (), others: int = 0, seed: int = 0
) -> Iterator[Record]:
    """Read a SQuAD file as queries and passages: each question with the paragraphs of its article.

    Relevant are all paragraphs that answer a question of this wording, as several in PolicyQA do.
    Paragraphs without questions are left out.

    Args:
        path: the file.
        part: part of the articles, as of a split; no passage is taken from other ones.
        others: paragraphs of other articles that each question has in addition.
        seed: of these.

    Yields:
        Records with ``query``, ``passages``, ``labels`` (1 or 0), ``id`` (that of the question's
        first occurrence) and ``group``, the article's title.

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    asked: dict[tuple[str, str], tuple[Place, str, set[str]]] = {}
    articles: dict[str, dict[str, None]] = {}
    for place, values in read_squad(path):
        title = values["title"]
        if part and not in_part(title or values["id"], part):
            continue
        articles.setdefault(title, {})[values["context"]] = None
        if values.get("answers", True):
            key = title, values["question"]
            asked.setdefault(key, (place, values["id"], set()))[2].add(values["context"])
    every = list(dict.fromkeys(passage for found in articles.values() for passage in found))
    for (title, query), (place, identifier, answering) in asked.items():
        own = articles[title]
        passages, draw = list(own), random.Random(f"{seed} {identifier}").random
        wanted = len(own) + min(others, len(every) - len(own))
        while len(passages) < wanted:
            drawn = every[int(draw() * len(every))]
            if drawn not in passages:
                passages.append(drawn)
        labels = [int(passage in answering) for passage in passages]
        yield Record(
            place,
            {"query": query, "passages": passages, "labels": labels, "id": identifier,
             "group": title},
        )  # fmt: skip


def in_part(name: str, part: Sequence[float]) -> bool:
    """Return whether a hash of a name, as a number from 0 to 1, lies in a part of a split."""
    digest = hashlib.sha256(name.encode()).digest()
    return part[0] <= int.from_bytes(digest[:7], "big") / 2**56 < part[1]


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

"""Every format malformed in five ways or more: one line that names file and line, and no output."""

from __future__ import annotations

import gzip
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from megatron_deberta.errors import DataError
from megatron_deberta.tasks import TaskConfig, encode, load_task, read_examples
from megatron_deberta.tasks.formats import read_conll
from megatron_deberta.tokenizer import Tokenizer
from tests.support.corpus import corpus_path
from tests.support.selection import every
from tests.support.task_files import PUBLISHED, squad

Damage = Callable[[bytes], tuple[bytes, int]]
"""Damages a file; returns its new content, and the line where the damage is."""


@cache
def load(name: str) -> TaskConfig:
    return load_task(name)


def line_of(content: bytes, at: int) -> int:
    return content.count(b"\n", 0, at) + 1


def replaced(old: bytes, new: bytes, number: int = -1) -> Damage:
    """Replace the last occurrence, or the one of a number."""

    def damage(content: bytes) -> tuple[bytes, int]:
        found = [match.start() for match in re.finditer(re.escape(old), content)]
        assert found, f"{old!r} does not occur"
        at = found[number]
        return content[:at] + new + content[at + len(old) :], line_of(content, at)

    return damage


def in_part(
    part: Callable[[bytes], tuple[int, int]], pattern: bytes, new: bytes, line: int = 0
) -> Damage:
    """Replace a pattern once in a part of a file, whose first line is named unless another is."""

    def damage(content: bytes) -> tuple[bytes, int]:
        begin, end = part(content)
        changed, count = re.subn(pattern, new, content[begin:end], count=1)
        assert count, f"{pattern!r} does not match"
        return content[:begin] + changed + content[end:], line or line_of(content, begin)

    return damage


def last_line(content: bytes) -> tuple[int, int]:
    end = len(content.rstrip(b"\n"))
    return content.rfind(b"\n", 0, end) + 1, end


in_last_line = partial(in_part, last_line)
in_first_line = partial(in_part, lambda content: (0, content.index(b"\n")))
in_last_item = partial(in_part, lambda content: (content.rindex(b"<item"), len(content)))


def not_text(byte: bytes) -> Damage:
    """Put a byte after two thirds of the file, where a line begins or is."""

    def damage(content: bytes) -> tuple[bytes, int]:
        at = len(content) * 2 // 3
        return content[:at] + byte + content[at:], line_of(content, at)

    return damage


def emptied(content: bytes) -> tuple[bytes, int]:
    return b" \n", 1


UNREADABLE = [("not UTF-8", not_text(b"\xff")), ("NUL", not_text(b"\0")), ("empty", emptied)]


TSV = [
    ("columns instead of", in_last_line(rb"\t[^\t]*$", b"")),
    ("is not one of", in_last_line(rb"\t[^\t]*$", b"\tmaybe")),
    ("is empty", in_last_line(rb"\t[^\t]+(?=\t[^\t]*$)", b"\t ")),
    ("no column", in_first_line(rb"[^\t]+$", b"renamed", line=2)),
    *UNREADABLE,
]


JSONL = [
    ("not valid JSON", in_last_line(rb": ", b" ")),
    ("expected a JSON object", in_last_line(rb".*", b"[1]")),
    *UNREADABLE,
]


CONLL = [
    ("columns instead of", in_last_line(rb"[\t ][^\t ]*$", b"")),
    ("columns instead of", in_last_line(rb"([\t ])", rb"\1X\1")),
    *UNREADABLE,
]


SQUAD = [
    ("not valid JSON", replaced(b'"answer_start": ', b'"answer_start" ')),
    ("is not at character", replaced(b'"answer_start": ', b'"answer_start": 1')),
    ("needs text", replaced(b'"answer_start": ', b'"answer_start": -0.')),
    ("no 'question'", replaced(b'"question": ', b'"Question": ')),
    ("no 'data'", replaced(b'"data"', b'"Data"')),
    ("lone surrogate", replaced(b'"question": "', b'"question": "\\udc00')),
    *UNREADABLE,
]


CASES: dict[str, list[tuple[str, Damage]]] = {
    # GLUE's other tables.
    "mnli/dev_matched.tsv": [
        ("columns instead of", in_last_line(rb"^1\t", b"")),
        ("is not one of", replaced(b"\tcontradiction\n", b"\tContra\n")),
        ("no column 'gold_label'", in_first_line(rb"gold_label", b"gold", line=2)),
        ("columns are named 'label1'", in_first_line(rb"label2", b"label1")),
        *UNREADABLE,
    ],
    "rte/dev.tsv": TSV,
    # The test file has other columns than the training file, and a header.
    "cola/test.tsv": [
        ("columns instead of", in_last_line(rb"\t", b"")),
        ("occurs twice", in_last_line(rb"^1", b"0")),
        ("no column 'sentence'", in_first_line(rb"sentence", b"text", line=2)),
        ("is empty", in_last_line(rb"\t.*", b"\t")),
        *UNREADABLE,
    ],
    # SuperGLUE.
    "boolq/val.jsonl": [
        *JSONL,
        ("label 'maybe' is not one of", in_last_line(rb"false", b'"maybe"')),
        ("no column 'passage'", in_last_line(rb"passage", b"Passage")),
        ("'question' is a list", in_last_line(rb'"did it rain"', b"[]")),
    ],
    "copa/val.jsonl": [
        *JSONL,
        ("beyond the 2 choices", in_last_line(rb'"label": 1', b'"label": 2')),
        ("no column 'choice2'", in_last_line(rb"choice2", b"choice3")),
    ],
    "multirc/val.jsonl": [
        *JSONL,
        ("no 'questions'", in_last_line(rb'"questions"', b'"question"')),
        ("is not one of 0, 1", in_last_line(rb'"label": 1', b'"label": 7')),
        ("'answers' is null", in_last_line(rb'"answers": \[.*?\]', b'"answers": null')),
    ],
    "record/val.jsonl": [
        *JSONL,
        ("is not in the passage", in_last_line(rb'"end": 35', b'"end": 350')),
        ("'start' is '0'", in_last_line(rb'"start": 0', b'"start": "0"')),
        ("is not at character", in_last_line(rb'"text": "Bob"', b'"text": "Rob"')),
        ("no 'query'", in_last_line(rb'"query"', b'"Query"')),
    ],
    "wic/val.jsonl": [
        *JSONL,
        ("is not in sentence2", in_last_line(rb'"end2": 6', b'"end2": 60')),
        ("no 'start1'", in_last_line(rb'"start1"', b'"Start1"')),
    ],
    "wsc/val.jsonl": [
        *JSONL,
        ("not the pronoun 'his'", in_last_line(rb'"span2_index": 4', b'"span2_index": 5')),
        ("is not one of the 8 words", in_last_line(rb'"span2_index": 4', b'"span2_index": 40')),
        ("no 'target'", in_last_line(rb'"target"', b'"Target"')),
    ],
    "squad1/dev-v1.1.json": [
        *SQUAD,
        ("has no answer", in_last_line(rb'"answers": \[.*?\]', b'"answers": []')),
    ],
    "squad2/dev-v2.0.json": [
        *SQUAD[3:],
        ("occurs twice", replaced(b'"id": "q2"', b'"id": "q1"')),
        ("but there are answers", replaced(b'"is_impossible": false', b'"is_impossible": true')),
        ("'is_impossible' is a string", replaced(b"true", b'"yes"')),
    ],
    # A file among others of a folder.
    "race/dev/middle/7.txt": [
        ("not valid JSON", replaced(b":", b"")),
        ("1 answers for 2 questions", replaced(b'["B", "A"]', b'["B"]')),
        ("label 'E' is not one of", replaced(b'"B"', b'"E"', 0)),
        ("no 'article'", replaced(b'"article"', b'"Article"')),
        (
            "'options' is a string, not a list",
            in_last_line(rb'"options": \[\[.*?\]', b'"options": ["a"'),
        ),
        *UNREADABLE,
    ],
    "swag/val.csv": [
        ("columns instead of", in_last_line(rb",walks off\.", b"")),
        ("not valid CSV", in_last_line(rb'""\."', b'".')),
        ("beyond the 4 choices", in_last_line(rb",1$", b",4")),
        ("no column 'sent2'", in_first_line(rb"sent2", b"sent3", line=2)),
        ("a choice is empty", in_last_line(rb"walks off\.", b"")),
        *UNREADABLE,
    ],
    "conll2003/valid.txt": [
        ("columns instead of", replaced(b"Blackburn NNP", b"Blackburn")),
        ("'I-CITY' is not one of", replaced(b"I-LOC", b"I-CITY")),
        ("columns instead of", replaced(b"German JJ", b"German person JJ")),
        *UNREADABLE,
    ],
}  # fmt: skip


PARAMETERS = [(name, message, damage) for name, cases in CASES.items() for message, damage in cases]


REAL = {
    ("cola", "dev", "tasks/glue/CoLA/dev.tsv"): [TSV[0], *UNREADABLE,
        ("is not one of", replaced(b"\t1\t", b"\t7\t"))],
    ("sst2", "dev", "tasks/glue/SST-2/dev.tsv"): [*TSV[:2], *TSV[3:]],
    ("mrpc", "train", "tasks/glue/MRPC/train.tsv"): [TSV[0], *UNREADABLE,
        ("is not one of", in_last_line(rb"^.", b"2")),
        # Only the byte-order mark in front may be ignored.
        ("no column 'Quality'", in_first_line(rb"Quality", b"\xef\xbb\xbfQuality", line=2))],
    ("stsb", "dev", "tasks/glue/STS-B/dev.tsv"): [
        ("is not in 0..5", in_last_line(rb"\t[^\t]*$", b"\t5.1")),
        ("is not a number", in_last_line(rb"\t[^\t]*$", b"\tnan")), *TSV[2:]],
    ("qnli", "dev", "tasks/glue/QNLI/dev.tsv"): TSV,
    ("wnli", "train", "tasks/glue/WNLI/train.tsv"): TSV,
    ("wnut17", "train", "tasks/ner/wnut17train.conll"): [*CONLL,
        ("is not one of", replaced(b"\tB-person", b"\tB-robot"))],
    ("chunking", "dev", "conll2000/test.txt.gz"): [*CONLL,
        ("is not one of", replaced(b" B-NP", b" B-XP"))],
    ("policyqa", "train", "tasks/qa/policyqa.dev.json"): SQUAD,
    # Printed over many lines, so the line that is named matters.
    ("xquad", "dev", "tasks/qa/xquad.zh.json"): [
        ("not valid JSON", replaced(b'"answer_start": ', b'"answer_start" ')),
        ("is not at character", replaced(b'"answer_start": ', b'"answer_start": 1')),
        ("no 'question'", replaced(b'"question": ', b'"Question": ')),
        ("answers are null", replaced(b'"answers": ', b'"answers": null, "old": ')),
        *UNREADABLE],
    ("quail", "train", "tasks/choice/quail_dev.xml"): [
        ("not valid XML", replaced(b"</q>", b"</Q>")),
        ("0 answers are correct", replaced(b'correct="True"', b'correct="False"')),
        ("2 answers are correct", replaced(b'correct="False"', b'correct="True"')),
        ("no <text_body>", lambda c: (c.replace(b"text_body", b"body"), 2)),
        ("entity declarations", lambda c: (
            b'<!DOCTYPE d [<!ENTITY a "b">]>\n' + c, 1)),
        ("not valid XML", not_text(b"\xff"))],
    ("balanced_copa", "train", "tasks/choice/balanced_copa.xml"): [
        ("not valid XML", replaced(b"</p>", b"</q>")),
        ("asks-for is 'reason'", replaced(b'asks-for="effect"', b'asks-for="reason"')),
        ("label '3' is not one of", replaced(b'alternative="2"', b'alternative="3"')),
        ("<a2> is empty", in_last_item(rb"<a2>[^<]*", b"<a2> ")),
        ("the id 'x'", replaced(b'id="1500"', b'id="x"'))],
}  # fmt: skip


def check(
    path: Path, task_name: str, split: str, file: str, message: str, tokenizer: Tokenizer
) -> int:
    """Read the file; return the line that the error names."""
    packaged = load(task_name)
    splits = {split: replace(packaged.splits[split], files=(file,))}
    task = replace(packaged, splits=splits)
    folder = path / "cache"
    with pytest.raises(DataError) as caught:
        encode(task, read_examples(task, path, split), tokenizer, cache=folder)
    found = str(caught.value)
    assert "\n" not in found
    assert message in found
    assert not folder.exists()
    match = re.match(r".+?[^:]:(\d+): ", found)
    assert match, found
    return int(match[1])


@pytest.mark.parametrize(
    ("name", "message", "damage"), PARAMETERS, ids=[f"{p[0]}: {p[1]}" for p in PARAMETERS]
)
def test_published_formats(
    name: str, message: str, damage: Damage, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    task, file = name.split("/", 1)
    content, line = damage(PUBLISHED[name].encode())
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    split = "test" if file.startswith("test") else "dev"
    read = "dev" if task == "race" else file
    if task == "race":
        whole = tmp_path / "dev" / "high" / "1.txt"
        whole.parent.mkdir(parents=True)
        whole.write_text(PUBLISHED["race/dev/high/1.txt"])
    assert check(tmp_path, task, split, read, message, tokenizer) == line


REAL_CASES = [(*key, message, damage) for key, cases in REAL.items() for message, damage in cases]


@pytest.mark.parametrize(
    ("task", "split", "file", "message", "damage"),
    every(2, REAL_CASES, ["slow"]),
    ids=[f"{case[2]}: {case[3]}" for case in REAL_CASES],
)
def test_real_files(
    task: str, split: str, file: str, message: str, damage: Damage, tmp_path: Path,
    tokenizer: Tokenizer,
) -> None:  # fmt: skip
    source = corpus_path(file)
    content = source.read_bytes()
    if source.suffix == ".gz":
        content = gzip.decompress(content)
    damaged, line = damage(content)
    (tmp_path / "file").write_bytes(damaged)
    found = check(tmp_path, task, split, "file", message, tokenizer)
    if "json" in file and message not in ("not valid JSON", *dict(UNREADABLE)):
        # The line of the object that is wrong, which begins before the damage.
        assert line - 8 <= found <= line
    elif "xml" in file and "valid" not in message:
        assert line - 12 <= found <= line
    else:
        assert found == line


def test_the_line_of_a_value_in_printed_json(tmp_path: Path, tokenizer: Tokenizer) -> None:
    questions = [
        {"question": f"q {i}?", "id": f"{i}", "answers": [{"text": "The", "answer_start": 0}]}
        for i in range(5)
    ]
    questions[3]["answers"] = [{"text": "The", "answer_start": 1}]
    content = squad("1.1", questions, indent=1)
    (tmp_path / "file").write_text(content)
    found = check(tmp_path, "squad1", "dev", "file", "is not at character 1", tokenizer)
    lines = content.split("\n")
    assert lines[found - 1].strip() == "{"
    assert lines[found].strip() == '"question": "q 3?",'


@pytest.mark.parametrize("cut", [3, 10, 0.5, 0.9])
def test_truncated_gzip(cut: float, tmp_path: Path, tokenizer: Tokenizer) -> None:
    whole = gzip.compress(PUBLISHED["rte/dev.tsv"].encode())
    size = int(cut if cut >= 1 else len(whole) * cut)
    (tmp_path / "dev.tsv.gz").write_bytes(whole[:size])
    with pytest.raises(DataError, match=r"dev.tsv.gz: cannot be read"):
        read_examples(load_task("rte"), tmp_path, "dev")


def test_missing_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("x")
    with pytest.raises(DataError, match=r"dev.tsv: no such file; there are train.csv"):
        read_examples(load_task("rte"), tmp_path, "dev")
    with pytest.raises(DataError, match=r"none: no such folder"):
        read_examples(load_task("rte"), tmp_path / "none", "dev")
    (tmp_path / "dev.tsv").mkdir()
    with pytest.raises(DataError, match=r"dev.tsv: is a folder; reader tsv reads files"):
        read_examples(load_task("rte"), tmp_path, "dev")
    (tmp_path / "dev").mkdir()
    with pytest.raises(DataError, match=r"dev: no .txt files"):
        read_examples(load_task("race"), tmp_path, "dev")


COPA_XML = (
    '<copa-corpus><item id="1" asks-for="cause" most-plausible-alternative="1"><p>It rained.</p>'
    "<a1>Clouds.</a1><a2>Sun.</a2></item></copa-corpus>"
)


QUAIL_XML = (
    '<data><text id="f1"><text_body>It rained.</text_body><questions><q id="0">What?'
    '<a id="0" correct="True">rain</a><a id="1" correct="False">sun</a></q></questions>'
    "</text></data>"
)


FILES = {
    **PUBLISHED,
    "balanced_copa/balanced_copa.xml": COPA_XML,
    "quail/quail_dev.xml": QUAIL_XML,
}


MUTATIONS = int(os.environ.get("MEGATRON_DEBERTA_MUTATIONS", "40"))


VALUES = (
    "null", "[]", "{}", "-1", "1e999", "NaN", "true", '""', "9" * 5000, '"\\ud800"', "[" * 2000,
    "\x00", "\ufeff", "\t", "\n\n", "\r", '"', "<", "&", "<!DOCTYPE x>", "\U0010ffff", "\x85",
)  # fmt: skip


def mutated(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice([0, 0, 1, 2, 8, 40]))
        kind = rng.randrange(4)
        if kind == 0:
            middle = rng.choice(VALUES).encode()
        elif kind == 1:
            middle = rng.randbytes(rng.randint(1, 4))
        elif kind == 2:
            at = rng.randrange(len(content) + 1)
            middle = content[at : at + rng.randint(1, 60)]
        else:
            middle = b""
        content = content[:start] + middle + content[end:]
    return content


@pytest.mark.parametrize("name", FILES)
def test_random_damage(name: str, tmp_path: Path) -> None:
    task_name, file = name.split("/", 1)
    task = load_task(task_name)
    split = next(s for s, value in task.splits.items() if file.startswith(value.files[0]))
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(name)
    messages = []
    for _ in range(MUTATIONS):
        path.write_bytes(mutated(FILES[name].encode(), rng))
        try:
            read_examples(task, tmp_path, split)
        except DataError as error:
            messages.append(str(error))
    assert messages
    assert [text for text in messages if "\n" in text or not text.startswith(str(tmp_path))] == []


@pytest.mark.parametrize("first", [0, 1])
def test_a_column_that_counts_the_words_is_refused(first: int, tmp_path: Path) -> None:
    path = tmp_path / "train.conllu"
    rows = [f"{number}\t{word}\tO" for number, word in enumerate(("A", "b", "c"), first)]
    path.write_text("\n".join(rows) + "\n")
    with pytest.raises(DataError, match=r"train\.conllu:1: the first column counts .* cut -f 2-"):
        list(read_conll(path, labelled=True, merge=False))
    path.write_text("\n".join(f"{n} O" for n in range(first, first + 3)) + "\n")
    assert len(list(read_conll(path, labelled=True, merge=False))) == 1

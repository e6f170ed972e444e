"""Readers on small files in published formats, and on real files counted independently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_deberta.tasks import Answer, Example, encode, load_task, read_examples
from megatron_deberta.tokenizer import Tokenizer
from tests.support.corpus import corpus_path
from tests.support.task_files import squad, write_published


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(tmp_path_factory.mktemp("published"))


def read(data: Path, task: str, split: str = "dev") -> list[Example]:
    return read_examples(load_task(task), data / task, split)


def pairs(examples: list[Example]) -> list[tuple[str | None, ...]]:
    return [(example.text, example.text_pair) for example in examples]


def test_mnli(data: Path) -> None:
    train = read(data, "mnli", "train")
    assert [example.label for example in train] == [2, 0, 1]
    assert train[1].text == 'He said "so.'
    # The second row of the dev file has no consensus.
    assert [example.label for example in read(data, "mnli")] == [0]
    (test,) = read(data, "mnli", "test")
    assert (test.id, test.label, test.text_pair) == ("0", None, "It is dark.")


def test_qqp_skips_its_broken_rows(data: Path) -> None:
    assert [(e.id, e.label) for e in read(data, "qqp", "train")] == [("133273", 1), ("360472", 0)]
    assert pairs(read(data, "qqp", "test")) == [("Who?", "Where?")]


def test_other_glue_files(data: Path) -> None:
    assert [example.label for example in read(data, "rte")] == [1, 0]
    assert [(e.id, e.text) for e in read(data, "cola", "test")] == [
        ("0", "The fox ran."),
        ("1", "Fox the ran."),
    ]
    assert read(data, "stsb", "test")[0].text_pair == "A girl is brushing."
    assert [example.label for example in read(data, "ax")] == [0]
    assert read(data, "ax", "test")[0].label is None


def test_superglue_tables(data: Path) -> None:
    assert [example.label for example in read(data, "boolq")] == [1, 0]
    assert read(data, "boolq", "test")[0].label is None
    assert read(data, "cb")[0].label == 1
    assert read(data, "superglue_rte")[0].label == 1
    assert read(data, "axb")[0].label == 0
    assert [example.group for example in read(data, "axg")] == ["1", "1"]
    assert pairs(read(data, "wic")) == [
        ('bank: The "bank" was steep.', 'bank: A "bank" lends.'),
    ]


def test_copa_joins_the_alternatives_by_what_is_asked(data: Path) -> None:
    cause, effect = read(data, "copa")
    assert (cause.text, cause.choices) == (
        "The man fell.",
        ("because He slipped.", "because He slept."),
    )
    assert (effect.choices[1], effect.label) == ("so It was wet.", 1)


def test_wsc_marks_the_pronoun_and_puts_the_noun_in_its_place(data: Path) -> None:
    first, second = read(data, "wsc")
    assert first.text.endswith("printed. *He* should have been careful.")
    assert first.text_pair is not None
    assert first.text_pair.endswith("printed. Pete should have been careful.")
    assert second.text == "Jim saw Kevin because *his* hat was red."
    assert second.text_pair == "Jim saw Kevin because Jim's hat was red."
    assert (first.label, second.label) == (1, 0)


def test_multirc_has_an_example_per_answer(data: Path) -> None:
    examples = read(data, "multirc")
    assert [example.id for example in examples] == ["0-0-0", "0-0-1", "0-1-2", "0-1-3", "0-1-4"]
    assert [example.group for example in examples] == ["0-0", "0-0", "0-1", "0-1", "0-1"]
    assert [example.label for example in examples] == [1, 0, 1, 0, 0]
    assert examples[3].text_pair == "Who was met? The moon"


def test_record_restricts_spans_to_entities(data: Path, tokenizer: Tokenizer) -> None:
    examples = read(data, "record")
    entities = (Answer("Anna", 0), Answer("Bob", 9), Answer("Rome", 16), Answer("Bob", 33))
    assert [example.candidates for example in examples] == [entities, entities]
    assert examples[1].answers == (Answer("Bob", 9), Answer("Bob", 33))
    encoded = encode(load_task("record"), examples, tokenizer)
    row = encoded.input_ids[encoded.row(0)].tolist()
    # The gap is the mask token.
    assert row.count(tokenizer.mask_id) == 1
    before = tokenizer.encode("In her mail")
    assert row[: len(before) + 2] == [tokenizer.cls_id, *before, tokenizer.mask_id]


def test_squad(data: Path) -> None:
    (example,) = read(data, "squad1")
    assert (example.id, example.text) == ("q1", "Whom did it meet?")
    assert example.answers == (Answer("a dog", 26),)
    answered, impossible = read(data, "squad2")
    assert answered.answers == (Answer("a dog", 26),)
    # Plausible answers are not right answers.
    assert impossible.answers == ()


def test_an_impossible_question_may_lack_answers(tmp_path: Path) -> None:
    bare = {"question": "Who?", "id": 7, "is_impossible": True}
    (tmp_path / "dev-v2.0.json").write_text(squad("v2.0", [bare]))
    (example,) = read_examples(load_task("squad2"), tmp_path, "dev")
    assert (example.id, example.answers) == ("7", ())


def test_race(data: Path) -> None:
    examples = read(data, "race")
    assert [example.id for example in examples] == [
        "high-1-0",
        "high-1-1",
        "middle-7-0",
        "middle-7-1",
    ]
    assert [example.group for example in examples] == ["high", "high", "middle", "middle"]
    assert examples[0].choices[1] == "The fox met _ . a dog"
    assert [example.label for example in examples] == [1, 0, 1, 0]


def test_swag(data: Path) -> None:
    (example,) = read(data, "swag")
    assert example.text == "Students, in a row, lower their eyes."
    assert example.choices == (
        "He pats her shoulder.",
        "He wheels around, and runs.",
        "He walks off.",
        'He sits "down".',
    )
    assert example.label == 1
    assert read(data, "swag", "test")[0].label is None


def test_conll2003_joins_the_sentences_of_a_document(data: Path) -> None:
    task = load_task("conll2003")
    first, second = read(data, "conll2003")
    assert first.words == ("EU", "rejects", "German", "call", "Peter", "Blackburn")
    assert first.breaks == (4,)
    assert [task.labels[tag] for tag in first.tags][:3] == ["I-ORG", "O", "I-MISC"]
    assert second.words == ("BRUSSELS",)
    separate = load_task("conll2003", ["merge_sentences=false"])
    assert len(read_examples(separate, data / "conll2003", "dev")) == 3


def read_real(task: str, split: str, folder: str) -> list[Example]:
    return read_examples(load_task(task), corpus_path(folder), split)


@pytest.mark.parametrize(
    ("task", "split", "folder", "count"),
    [
        ("cola", "train", "tasks/glue/CoLA", 8551),
        ("cola", "dev", "tasks/glue/CoLA", 1043),
        ("sst2", "dev", "tasks/glue/SST-2", 872),
        # One below GLUE's 3,668: the file at hand has a line less.
        ("mrpc", "train", "tasks/glue/MRPC", 3667),
        ("mrpc", "dev", "tasks/glue/MRPC", 408),
        ("mrpc", "test", "tasks/glue/MRPC", 1725),
        ("stsb", "train", "tasks/glue/STS-B", 5749),
        ("stsb", "dev", "tasks/glue/STS-B", 1500),
        ("qnli", "dev", "tasks/glue/QNLI", 5463),
        ("wnli", "train", "tasks/glue/WNLI", 635),
        ("wnli", "dev", "tasks/glue/WNLI", 71),
        ("wnut17", "train", "tasks/ner", 3394),
        ("wnut17", "dev", "tasks/ner", 1009),
        ("wnut17", "test", "tasks/ner", 1287),
        ("policyqa", "train", "tasks/qa", 3809),
        ("policyqa", "dev", "tasks/qa", 4152),
        ("chunking", "train", "conll2000", 8936),
        ("chunking", "dev", "conll2000", 2012),
    ],
)
def test_examples_of_real_files(task: str, split: str, folder: str, count: int) -> None:
    examples = read_real(task, split, folder)
    assert len(examples) == count
    assert len({example.id for example in examples}) == count
    labelled = [e for e in examples if e.label is not None or e.tags or e.answers]
    assert len(labelled) == (0 if (task, split) == ("mrpc", "test") else count)


def test_quirks_of_glue_files() -> None:
    mrpc = read_real("mrpc", "dev", "tasks/glue/MRPC")[0]
    assert mrpc.text.startswith("He said the foodservice pie business doesn 't fit")
    # An unbalanced quotation mark is text, and the first column's name has a byte-order mark.
    assert mrpc.text_pair is not None
    assert mrpc.text_pair.startswith('" The foodservice pie business')
    assert mrpc.label == 1
    cola = read_real("cola", "dev", "tasks/glue/CoLA")
    assert (cola[0].text, cola[0].label) == ("The sailors rode the breeze clear of the rocks.", 1)
    assert cola[4].label == 0
    stsb = read_real("stsb", "dev", "tasks/glue/STS-B")
    assert [example.label for example in stsb[:3]] == [5.0, 4.75, 5.0]
    qnli = read_real("qnli", "dev", "tasks/glue/QNLI")
    assert sum(example.label == 1 for example in qnli) == 2702


def test_quirks_of_conll_files() -> None:
    train = read_real("wnut17", "train", "tasks/ner")
    # Sentences end with a line that holds a tab.
    assert train[0].words[:3] == ("@paulwalk", "It", "'s")
    labels = load_task("wnut17").labels
    tags = [labels[tag] for tag in train[0].tags]
    assert tags[13:18] == ["O", "B-location", "I-location", "I-location", "O"]
    types = read_real("wnut17_types", "train", "tasks/ner")
    assert types[0].text.startswith("@paulwalk It 's the view")
    names = load_task("wnut17_types").labels
    for sentence, example in zip(train, types, strict=True):
        found = {labels[tag][2:] for tag in sentence.tags} - {""}
        assert example.tags == tuple(int(name in found) for name in names)
    chunks = read_real("chunking", "train", "conll2000")
    assert sum(len(example.words) for example in chunks) == 211_727


def test_a_split_of_one_file() -> None:
    train = read_real("qnli_dev", "train", "tasks/glue/QNLI")
    dev = read_real("qnli_dev", "dev", "tasks/glue/QNLI")
    assert len(train) + len(dev) == 5463
    assert 0.78 < len(train) / 5463 < 0.82
    assert not {example.id for example in train} & {example.id for example in dev}
    shares = [np.mean([example.label for example in part]) for part in (train, dev)]
    assert abs(shares[0] - shares[1]) < 0.04


@pytest.mark.parametrize(
    ("task", "count", "groups"), [("quail", 2164, 120), ("balanced_copa", 1000, 500)]
)
def test_choices_of_one_file_are_split_by_group(task: str, count: int, groups: int) -> None:
    train, dev = (read_real(task, split, "tasks/choice") for split in ("train", "dev"))
    assert len(train) + len(dev) == count
    assert 0.7 < len(train) / count < 0.9
    members = [{example.group for example in part} for part in (train, dev)]
    assert not members[0] & members[1]
    assert sum(map(len, members)) == groups
    assert all(example.label is not None for example in train + dev)
    sizes = {len(example.choices) for example in train + dev}
    assert sizes == {4 if task == "quail" else 2}


def test_train_and_dev_share_no_policy_or_passage() -> None:
    """No policy and no passage is in both train and dev, though two policies share paragraphs."""
    parts = [read_real("policyqa_rerank", split, "tasks/qa") for split in ("train", "dev")]
    groups, passages = (
        [{value for example in part for value in values(example)} for part in parts]
        for values in (lambda e: [e.group], lambda e: e.choices)
    )
    assert not groups[0] & groups[1]
    assert not passages[0] & passages[1]
    assert list(map(len, groups)) == [34, 6]
    for example in (example for part in parts for example in part):
        assert 2 <= len(example.choices) <= 10
        assert len(set(example.choices)) == len(example.choices)
        assert set(example.relevance) == {0.0, 1.0}


def test_other_passages_are_drawn_by_a_seed(tmp_path: Path) -> None:
    def question(number: int, text: str, **more: Any) -> dict[str, Any]:
        answers = [{"text": "p", "answer_start": 0}]
        return {"id": number, "question": text, "answers": answers, **more}

    articles = [
        {
            "title": f"t{a}",
            "paragraphs": [
                {"context": f"p{a}{n}", "qas": [question(10 * a + n, "Same?" if n < 2 else f"{n}")]}
                for n in range(3)
            ],
        }
        for a in range(6)
    ]
    impossible = question(99, "None?", is_impossible=True, answers=[])
    articles[0]["paragraphs"][0]["qas"].append(impossible)
    (tmp_path / "f.json").write_text(json.dumps({"data": articles}))
    keys = ["splits={train: f.json}", "random_passages=2", "max_passages=0"]

    def read(*more: str) -> list[Example]:
        return read_examples(load_task("policyqa_rerank", [*keys, *more]), tmp_path, "train")

    first = read()
    assert first == read() != read("passage_seed=1")
    # The two paragraphs with a question of the same wording are both relevant.
    assert [(e.id, e.text, e.group) for e in first[:3]] == [
        ("0", "Same?", "t0"), ("2", "2", "t0"), ("10", "Same?", "t1"),
    ]  # fmt: skip
    assert len(first) == 12
    for example in first:
        own, others = example.choices[:3], example.choices[3:]
        assert [passage[:2] for passage in own] == [f"p{example.group[1]}"] * 3
        assert len(set(others)) == 2
        assert not {passage[:2] for passage in others} & {f"p{example.group[1]}"}
        relevant = (1.0, 1.0, 0.0) if example.text == "Same?" else (0.0, 0.0, 1.0)
        assert example.relevance == (*relevant, 0.0, 0.0)
    # No more than there are
    assert {len(example.choices) for example in read("random_passages=99")} == {18}
    # Those of a part are drawn from it.
    half = read("splits={train: {files: f.json, part: [0, 0.5]}}")
    assert 0 < len(half) < 12
    kept = {example.group for example in half}
    assert {f"t{passage[1]}" for example in half for passage in example.choices} == kept


def test_chinese_answers_stand_where_they_say() -> None:
    task = load_task("xquad", ["splits.dev=xquad.zh.json"])
    examples = read_examples(task, corpus_path("tasks/qa"), "dev")
    assert len(examples) == 1190
    for example in examples:
        for answer in example.answers or ():
            assert (example.text_pair or "")[answer.start : answer.end] == answer.text

"""The readers on real files, counted independently of them."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_deberta.tasks import Example, load_task, read_examples
from tests.support.corpus import corpus_path


def read(task: str, split: str, folder: str) -> list[Example]:
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
    examples = read(task, split, folder)
    assert len(examples) == count
    assert len({example.id for example in examples}) == count
    labelled = [e for e in examples if e.label is not None or e.tags or e.answers]
    assert len(labelled) == (0 if (task, split) == ("mrpc", "test") else count)


def test_quirks_of_glue_files() -> None:
    mrpc = read("mrpc", "dev", "tasks/glue/MRPC")[0]
    assert mrpc.text.startswith("He said the foodservice pie business doesn 't fit")
    # An unbalanced quotation mark is text, and the first column's name has a byte-order mark.
    assert mrpc.text_pair is not None
    assert mrpc.text_pair.startswith('" The foodservice pie business')
    assert mrpc.label == 1
    cola = read("cola", "dev", "tasks/glue/CoLA")
    assert (cola[0].text, cola[0].label) == ("The sailors rode the breeze clear of the rocks.", 1)
    assert cola[4].label == 0
    stsb = read("stsb", "dev", "tasks/glue/STS-B")
    assert [example.label for example in stsb[:3]] == [5.0, 4.75, 5.0]
    qnli = read("qnli", "dev", "tasks/glue/QNLI")
    assert sum(example.label == 1 for example in qnli) == 2702


def test_quirks_of_conll_files() -> None:
    train = read("wnut17", "train", "tasks/ner")
    # Sentences end with a line that holds a tab.
    assert train[0].words[:3] == ("@paulwalk", "It", "'s")
    labels = load_task("wnut17").labels
    tags = [labels[tag] for tag in train[0].tags]
    assert tags[13:18] == ["O", "B-location", "I-location", "I-location", "O"]
    chunks = read("chunking", "train", "conll2000")
    assert sum(len(example.words) for example in chunks) == 211_727


def test_a_split_of_one_file() -> None:
    train = read("qnli_dev", "train", "tasks/glue/QNLI")
    dev = read("qnli_dev", "dev", "tasks/glue/QNLI")
    assert len(train) + len(dev) == 5463
    assert 0.78 < len(train) / 5463 < 0.82
    assert not {example.id for example in train} & {example.id for example in dev}
    shares = [np.mean([example.label for example in part]) for part in (train, dev)]
    assert abs(shares[0] - shares[1]) < 0.04


@pytest.mark.parametrize(
    ("task", "count", "groups"), [("quail", 2164, 120), ("balanced_copa", 1000, 500)]
)
def test_choices_of_one_file_are_split_by_group(task: str, count: int, groups: int) -> None:
    train, dev = (read(task, split, "tasks/choice") for split in ("train", "dev"))
    assert len(train) + len(dev) == count
    assert 0.7 < len(train) / count < 0.9
    members = [{example.group for example in part} for part in (train, dev)]
    assert not members[0] & members[1]
    assert sum(map(len, members)) == groups
    assert all(example.label is not None for example in train + dev)
    sizes = {len(example.choices) for example in train + dev}
    assert sizes == {4 if task == "quail" else 2}


def test_chinese_answers_stand_where_they_say() -> None:
    task = load_task("xquad", ["splits.dev=xquad.zh.json"])
    examples = read_examples(task, corpus_path("tasks/qa"), "dev")
    assert len(examples) == 1190
    for example in examples:
        for answer in example.answers or ():
            assert (example.text_pair or "")[answer.start : answer.end] == answer.text

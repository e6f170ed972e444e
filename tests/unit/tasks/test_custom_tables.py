"""A user's own data: every table format gives the same examples, for every head."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.tasks import Answer, Example, encode, load_task, read_examples
from megatron_deberta.tokenizer import Tokenizer
from tests.support.selection import every

Rows = list[dict[str, Any]]
CLASSES: Rows = [
    {"text": 'A "good" film, mostly', "label": "positive"},
    {"text": "Bad.\nVery bad.", "label": "negative"},
]


def write(folder: Path, form: str, rows: Rows) -> None:
    """Write rows as ``train``; lists become strings of words in CSV and TSV."""
    if form == "jsonl":
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    elif form == "datasets":
        write_dataset(folder / "train", rows, {})
    else:
        with (folder / f"train.{form}").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), delimiter="\t" if form == "tsv" else ",")
            writer.writeheader()
            for row in rows:
                writer.writerow(
                    {k: " ".join(v) if isinstance(v, list) else v for k, v in row.items()}
                )


def write_dataset(folder: Path, rows: Rows, features: dict[str, Any]) -> None:
    """Write a split as ``datasets.Dataset.save_to_disk`` does, in two files."""
    folder.mkdir()
    info = json.dumps({"info": {"features": features}}).encode()
    files = []
    for number, part in enumerate((rows[:1], rows[1:])):
        table = pyarrow.Table.from_pylist(part)
        table = table.replace_schema_metadata({b"huggingface": info})
        name = f"data-{number:05}-of-00002.arrow"
        with pyarrow.OSFile(str(folder / name), "wb") as sink:
            with pyarrow.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        files.append({"filename": name})
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")


FORMS = ["csv", "tsv", "jsonl", "parquet", "datasets"]


def read(folder: Path, head: str, *overrides: str) -> list[Example]:
    return read_examples(load_task(f"custom_{head}", overrides), folder, "train")


SPANS: Rows = [
    {"question": "Who?", "context": "Bob ran. Bob sat.", "answer": "Bob", "answer_start": 9},
    {"question": "What?", "context": "It rains.", "answer": "rains", "answer_start": 3},
]
NESTED: Rows = [
    {"question": "Who?", "context": "Bob ran. Bob sat.",
     "answers": {"text": ["Bob"], "answer_start": [9]}},
] * 2  # fmt: skip
CHOICES: Rows = [
    {"passage": "It rains.", "question": "It is", "choices": ["wet", "dry", "red"], "label": 2},
    {"passage": "Sun.", "question": "It is", "choices": ["warm", "cold"], "label": 0},
]
PAIRS: Rows = [
    {"text": "a", "text_pair": "b", "wrong": "x", "score": 0.5},
    {"text": "c", "text_pair": "d", "wrong": "y", "score": 1.0},
]
TEXTS = "question: question, context: context"
CASES: list[tuple[str, str, Rows, dict[str, Any], list[str]]] = [
    # A line break inside a field is an error in TSV.
    ("classification", "", CLASSES, {"id": ["0", "1"], "label": [1, 0],
     "text": [row["text"] for row in CLASSES]}, [form for form in FORMS if form != "tsv"]),
    ("multilabel", "", [{"text": "a", "labels": "delivery, billing"}, {"text": "b", "labels": " "},
                        {"text": "c", "labels": "delivery"}],
     {"tags": [(1, 1), (0, 0), (0, 1)], "label": [None] * 3}, FORMS),
    ("multilabel", "", [{"text": "a", "labels": ["delivery", "billing"]},
                        {"text": "b", "labels": ["billing"]}],
     {"tags": [(1, 1), (1, 0)]}, FORMS[2:]),
    ("multilabel", "columns={text: text, label: [m, n]}",
     [{"text": "a", "m": 0, "n": 1}, {"text": "b", "m": 1, "n": 0}],
     {"tags": [(0, 1), (1, 0)]}, FORMS),
    ("multilabel", "label_separator=;", [{"text": "a", "labels": "billing;delivery"}] * 2,
     {"tags": [(1, 1)] * 2}, FORMS),
    ("regression", "", [{"text": "a", "score": 0.5}, {"text": "b", "score": -2.0}],
     {"label": [0.5, -2.0]}, FORMS),
    ("tokens", "", [{"tokens": ["Bob", "ran"], "tags": ["B-PER", "O"]},
                    {"tokens": ["Hi"], "tags": ["O"]}],
     {"words": [("Bob", "ran"), ("Hi",)], "tags": [(1, 0), (0,)]}, FORMS),
    ("spans", "", SPANS, {"answers": [(Answer("Bob", 9),), (Answer("rains", 3),)]}, FORMS),
    # Without the column, the first occurrence is the answer.
    ("spans", f"columns={{{TEXTS}, answer_text: answer}}", SPANS,
     {"answers": [(Answer("Bob", 0),), (Answer("rains", 3),)]}, FORMS),
    ("spans", f"columns={{{TEXTS}, answers: answers}}", NESTED,
     {"answers": [(Answer("Bob", 9),)] * 2}, FORMS[2:]),
    ("choices", "", CHOICES, {"label": [2, 0], "choices": [
        ("It is wet", "It is dry", "It is red"), ("It is warm", "It is cold")]}, FORMS[2:]),
    ("choices", "columns={text: passage, choices: [a, b], label: label}",
     [{"passage": "Sun.", "a": "warm sun", "b": "cold", "label": 1}] * 2,
     {"choices": [("warm sun", "cold")] * 2}, FORMS),
    ("embed", "", PAIRS, {"text_pair": ["b", "d"], "choices": [(), ()], "label": [None] * 2},
     FORMS),
    ("embed", "columns={text: text, text_pair: text_pair, negative: wrong, label: score}", PAIRS,
     {"text_pair": ["b", "d"], "choices": [("x",), ("y",)], "label": [0.5, 1.0]}, FORMS),
    ("rerank", "", [{"query": "rain", "passages": ["wet", "dry"], "labels": [2, 0.5]}] * 2,
     {"choices": [("wet", "dry")] * 2, "relevance": [(2.0, 0.5)] * 2}, FORMS[2:]),
    ("rerank", "", [{"query": "rain", "positive": ["wet"], "negative": ["dry", "red"]}] * 2,
     {"choices": [("wet", "dry", "red")] * 2, "relevance": [(1.0, 0.0, 0.0)] * 2}, FORMS[2:]),
    ("rerank", "columns={query: in.q, passages: in.texts, labels: in.marks}",
     [{"in": {"q": "rain", "texts": ["wet", "dry"], "marks": [1, 0]}}] * 2,
     {"text": ["rain"] * 2, "relevance": [(1.0, 0.0)] * 2}, FORMS[2:]),
    ("rerank", "", [{"query": "rain", "positive": "wet", "negative": "dry"}] * 2,
     {"choices": [("wet", "dry")] * 2, "relevance": [(1.0, 0.0)] * 2}, FORMS),
]  # fmt: skip


@pytest.mark.parametrize(
    ("head", "columns", "rows", "expected", "form"),
    every(2, [(*case, form) for *case, forms in CASES for form in forms], ["slow"]),
)
def test_every_format_gives_the_same_examples(
    head: str, columns: str, rows: Rows, expected: dict[str, Any], form: str, tmp_path: Path
) -> None:
    write(tmp_path, form, rows)
    examples = read(tmp_path, head, *filter(None, [columns]))
    assert {name: [getattr(e, name) for e in examples] for name in expected} == expected


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"passages": ["a", "b"], "labels": [1]}, "labels: 1 for 2 passages; give a list"),
        ({"passages": ["a", "b"], "labels": 1}, "labels: a number for 2 passages; give a list"),
        ({"passages": ["a", "b"], "labels": [1, -1]}, "score -1 is not in 0..inf"),
        ({"passages": ["a", "b"], "labels": [1, "x"]}, "score 'x' is not a number"),
        ({"passages": ["a", "b"]}, "the passages have no labels; give a list of numbers"),
        ({"passages": [], "labels": []}, "the query has no passages"),
        ({"positive": ["a", " "]}, "a passage is empty"),
        ({"positive": 3}, "'positive' is a number, not a list"),
    ],
)
def test_malformed_passages(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [{"query": "q", **row}])
    with pytest.raises(DataError, match=f"train.jsonl:1: .*{re.escape(problem)}"):
        read(tmp_path, "rerank")


def test_the_most_passages_of_a_query_keep_the_relevant_ones(tmp_path: Path) -> None:
    labels = [0, 1, 0, 0, 2, 0, 0, 0]
    row = {"query": "q", "passages": [*"abcdefgh"], "labels": labels}
    write(tmp_path, "jsonl", [row] * 20)
    first, again, other = (
        read(tmp_path, "rerank", "max_passages=4", f"passage_seed={seed}") for seed in (0, 0, 1)
    )
    assert first == again != other
    for example in first:
        kept = "".join(example.choices)
        assert len(kept) == 4
        assert {"b", "e"} < set(kept)
        assert kept == "".join(sorted(kept))
        assert example.relevance == tuple(float(labels["abcdefgh".index(c)]) for c in kept)
    assert len({example.choices for example in first}) > 5
    # One that is not relevant is always kept.
    for example in read(tmp_path, "rerank", "max_passages=2"):
        assert sum(map(bool, example.relevance)) == 1
    # Where relevance is not required, every passage is ranked.
    (tmp_path / "train.jsonl").rename(tmp_path / "test.jsonl")
    tested = read_examples(load_task("custom_rerank", ["max_passages=4"]), tmp_path, "test")
    assert len(tested[0].choices) == 8
    # Passages whose relevance is hidden are not relevant ones.
    hidden = {"query": "q", "passages": ["a", "b"], "positive": "c"}
    (tmp_path / "test.jsonl").write_text(json.dumps(hidden) + "\n")
    (found,) = read_examples(load_task("custom_rerank"), tmp_path, "test")
    assert found.choices == ("a", "b", "c")
    assert found.relevance == ()


def test_a_hypothesis_makes_choices_of_the_labels(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [{"text": "A fine film.", "label": "positive"}] * 2)
    keys = ["head=choices", "hypothesis=It is {}.", "metrics=[accuracy]"]
    first, _ = read(tmp_path, "classification", *keys)
    assert (first.choices, first.label) == (("It is negative.", "It is positive."), 1)
    with pytest.raises(ConfigError, match="is for head choices, with {} once for the label"):
        load_task("custom_classification", ["hypothesis=It is {}."])
    with pytest.raises(ConfigError, match="columns: choices missing for head choices"):
        load_task("custom_classification", [keys[0], keys[2]])


def test_other_labels_than_those_of_the_packaged_task_say_where_they_belong(tmp_path: Path) -> None:
    write(tmp_path, "tsv", [{"text": "Bad.", "label": "poor"}])
    with pytest.raises(DataError, match="is not one of negative, positive; list yours as") as error:
        read(tmp_path, "classification")
    assert "list yours as labels: [poor] in a task file with base: configs/tasks/custom_" in str(
        error.value
    )
    task = tmp_path / "own.yaml"
    task.write_text(
        "name: own\nbase: configs/tasks/custom_classification.yaml\nlabels: [poor, fine]\n"
    )
    assert read_examples(load_task(str(task)), tmp_path, "train")[0].label == 0


def test_class_ids_of_datasets_become_names(tmp_path: Path) -> None:
    features = {
        "tags": {"feature": {"names": ["O", "B-PER"], "_type": "ClassLabel"}, "_type": "Sequence"},
        "kind": {"names": ["x", "y"], "_type": "ClassLabel"},
    }
    rows: Rows = [{"tokens": ["Bob", "ran"], "tags": [1, 0], "kind": 1}]
    write_dataset(tmp_path / "train", rows * 2, features)
    first, _ = read(tmp_path, "tokens")
    assert first.tags == (1, 0)
    columns = ["columns={text: kind, label: kind}", "labels=[y, x]"]
    assert [example.label for example in read(tmp_path, "classification", *columns)] == [0, 0]


def test_templates_and_nested_columns(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [{"title": "Tea", "body": {"text": "Hot."}, "label": True}] * 2)
    columns = 'columns={text: "{title}: {body.text}", label: label}'
    first, _ = read(tmp_path, "classification", columns, "labels=[false, true]")
    assert (first.text, first.label) == ("Tea: Hot.", 1)


@pytest.mark.parametrize("form", ["parquet", "datasets"])
@pytest.mark.parametrize("cut", [0.0, 0.5, 0.99])
def test_damaged_tables(form: str, cut: float, tmp_path: Path) -> None:
    write(tmp_path, form, CLASSES)
    name = "train.parquet" if form == "parquet" else "train/data-00000-of-00002.arrow"
    path = tmp_path / name
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * cut)])
    with pytest.raises(DataError, match="damaged|cannot|no examples") as caught:
        read(tmp_path, "classification")
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "odd"}, "label 'odd' is not one of negative, positive"),
        ({"label": None}, "is not one of negative, positive"),
        ({"text": " "}, "text is empty"),
        ({"text": None}, "text is empty|'text' is null, not a string"),
        ({"id": "a"}, "id 'a' occurs twice"),
    ],
    ids=["unknown label", "no label", "blank text", "no text", "same id"],
)
def test_wrong_values_name_their_row(
    change: dict[str, Any], message: str, form: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows = [{"id": name, **CLASSES[0]} for name in "abc"]
    rows[1].update(change)
    write(tmp_path, form, rows)
    task = load_task("custom_classification", ["columns={id: id, text: text, label: label}"])
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match=message) as caught:
        encode(task, read_examples(task, tmp_path, "train"), tokenizer, cache=cache)
    assert not cache.exists()
    # Lines of CSV and TSV files count their header; rows of tables count from 1.
    file = {"datasets": "data-00001-of-00002.arrow"}.get(form, f"train.{form}")
    line = 3 if form in ("csv", "tsv") else 2
    assert f"{file}:{line}: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "row", "message"),
    [
        ("labels", {"labels": "billing,odd"}, "label 'odd' is not one of billing, delivery; list"),
        ("labels", {"labels": ["billing", None]}, "label 'None' is not one of"),
        ("labels", {"labels": None}, "label 'None' is not one of"),
        ("[a, b]", {"a": 1, "b": 2}, "'b' is 2; write 1 where the example has the label, else 0"),
        ("[a, c]", {"a": 1, "b": 1}, "no column 'c'"),
    ],
)
def test_wrong_labels_of_an_example_name_its_line(
    column: str, row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, "jsonl", [{"text": "x", "labels": [], "a": 0, "b": 0, "c": 0}])
    with (tmp_path / "train.jsonl").open("a") as stream:
        stream.write(json.dumps({"text": "x", **row}) + "\n")
    with pytest.raises(DataError, match=f"train.jsonl:2: {message}"):
        read(tmp_path, "multilabel", f"columns={{text: text, label: {column}}}")


def test_hidden_labels_of_a_test_split_are_none(tmp_path: Path) -> None:
    """In a test split -1 hides the labels; an empty string says that there are none."""
    rows: Rows = [{"text": "a", "labels": "-1"}, {"text": "b", "labels": ""}]
    write(tmp_path, "csv", rows)
    (tmp_path / "train.csv").rename(tmp_path / "test.csv")
    task = load_task("custom_multilabel")
    assert [e.tags for e in read_examples(task, tmp_path, "test")] == [(), (0, 0)]
    (tmp_path / "test.csv").write_text("text,a,b\nx,-1,-1\ny,0,1\n")
    task = load_task("custom_multilabel", ["columns={text: text, label: [a, b]}"])
    assert [e.tags for e in read_examples(task, tmp_path, "test")] == [(), (0, 1)]
    (tmp_path / "test.csv").write_text("text\nx\n")
    assert [e.tags for e in read_examples(task, tmp_path, "test")] == [()]


def test_rows_with_a_label_to_skip(tmp_path: Path) -> None:
    rows: Rows = [{"text": "a", "labels": "billing,?"}, {"text": "b", "labels": "billing"}]
    write(tmp_path, "csv", rows)
    assert [e.text for e in read(tmp_path, "multilabel", 'skip_labels=["?"]')] == ["b"]


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_column_is_named(form: str, tmp_path: Path) -> None:
    write(tmp_path, form, [{"text": "a", "Label": "positive"}] * 2)
    with pytest.raises(DataError, match=r":[12]: no column 'label' .there are 'text', 'Label'."):
        read(tmp_path, "classification")


def test_a_dataset_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, "datasets", CLASSES)
    state = {"_data_files": [{"filename": "../../secret.arrow"}]}
    (tmp_path / "train/state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"train/secret.arrow: cannot be read: No such file"):
        read(tmp_path, "classification")

"""Prediction files of leaderboards, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.errors import ConfigError
from megatron_deberta.tasks import (
    Answer,
    Example,
    Prediction,
    json_lines,
    load_task,
    write_predictions,
)


def written(folder: Path, task: str, found: list[Prediction], split: str = "test") -> str:
    examples = [Example(id=p.id) for p in found]
    (path,) = write_predictions(load_task(task), split, examples, found, folder)
    return f"{path.name}\n{path.read_text()}"


@pytest.mark.parametrize(
    ("task", "split", "value", "file", "line"),
    [
        ("cola", "test", "1", "CoLA.tsv", "3\t1"),
        ("mnli", "test_mismatched", "entailment", "MNLI-mm.tsv", "3\tentailment"),
        ("stsb", "test", 4.98765, "STS-B.tsv", "3\t4.988"),
        ("ax", "test", "entailment", "AX.tsv", "3\tentailment"),
    ],
)
def test_glue(tmp_path: Path, task: str, split: str, value: Any, file: str, line: str) -> None:
    found = [Prediction(id="3", value=value)]
    assert written(tmp_path, task, found, split) == f"{file}\nindex\tprediction\n{line}\n"


@pytest.mark.parametrize(
    ("task", "index", "value", "line"),
    [
        ("boolq", 1, "true", '{"idx":3,"label":"true"}'),
        ("cb", 2, "entailment", '{"idx":3,"label":"entailment"}'),
        ("copa", 1, "1", '{"idx":3,"label":1}'),
        ("record", -1, "New York", '{"idx":3,"label":"New York"}'),
        ("superglue_rte", 0, "not_entailment", '{"idx":3,"label":"not_entailment"}'),
        ("wic", 0, "false", '{"idx":3,"label":"false"}'),
        # WSC alone is written with a capital.
        ("wsc", 0, "false", '{"idx":3,"label":"False"}'),
    ],
)
def test_superglue(tmp_path: Path, task: str, index: int, value: str, line: str) -> None:
    names = {"superglue_rte": "RTE", "record": "ReCoRD", "boolq": "BoolQ", "wic": "WiC"}
    name = names.get(task, task.upper())
    found = [Prediction(id="3", index=index, value=value)]
    assert written(tmp_path, task, found) == f"{name}.jsonl\n{line}\n"


def test_multirc_is_nested(tmp_path: Path) -> None:
    labels = {"0-0-0": 1, "0-0-1": 0, "0-1-2": 1, "1-2-5": 0}
    found = [Prediction(id=name, index=at, value=str(at)) for name, at in labels.items()]
    _, *lines = written(tmp_path, "multirc", found).splitlines()
    first = {"idx": 0, "answers": [{"idx": 0, "label": 1}, {"idx": 1, "label": 0}]}
    second = {"idx": 1, "answers": [{"idx": 2, "label": 1}]}
    assert [json.loads(line) for line in lines] == [
        {"idx": 0, "passage": {"questions": [first, second]}},
        {"idx": 1, "passage": {"questions": [{"idx": 2, "answers": [{"idx": 5, "label": 0}]}]}},
    ]
    found = [Prediction(id="3", index=1, value="1")]
    with pytest.raises(ConfigError, match="id '3' does not name passage, question and answer"):
        written(tmp_path, "multirc", found)


def test_squad(tmp_path: Path) -> None:
    found = [
        Prediction(id="q1", value="New York", null_score=-3.5),
        Prediction(id="q2", value="", null_score=2.0),
    ]
    examples = [Example(id="q1"), Example(id="q2")]
    paths = write_predictions(load_task("squad2"), "dev", examples, found, tmp_path / "new")
    assert [path.name for path in paths] == ["dev_predictions.json", "dev_null_odds.json"]
    assert json.loads(paths[0].read_text()) == {"q1": "New York", "q2": ""}
    assert json.loads(paths[1].read_text()) == {"q1": -3.5, "q2": 2.0}
    paths = write_predictions(load_task("squad1"), "dev", examples, found, tmp_path)
    assert [path.name for path in paths] == ["dev_predictions.json"]


def test_conll(tmp_path: Path) -> None:
    task = load_task("conll2003")
    examples = [Example(id="0", words=("Anna", "ran", "Bob"), tags=(4, 0, 4), breaks=(2,))]
    found = [Prediction(id="0", value=("I-PER", "O", "O"))]
    (path,) = write_predictions(task, "dev", examples, found, tmp_path)
    assert path.name == "dev.conll"
    assert path.read_text() == "Anna I-PER I-PER\nran O O\n\nBob I-PER O\n\n"
    examples = [Example(id="0", words=("Anna", "ran", "Bob"))]
    (path,) = write_predictions(task, "test", examples, found, tmp_path)
    assert path.read_text() == "Anna I-PER\nran O\nBob O\n\n"


def test_other_tasks_have_json_lines(tmp_path: Path) -> None:
    task = load_task("custom_classification")
    found = [
        Prediction(id=name, index=1, value="positive", probabilities=(0.25, 0.75)) for name in "ab"
    ]
    examples = [Example(id="a", text="It is.", label=0), Example(id="b", text="x", text_pair="y")]
    (path,) = write_predictions(task, "predict", examples, found, tmp_path)
    first, second = path.read_text().splitlines()
    assert path.name == "predict.jsonl"
    assert first == (
        '{"id":"a","text":"It is.","label":"positive","scores":{"negative":0.25,"positive":0.75},'
        '"index":1,"gold":"negative"}'
    )
    assert json.loads(second)["text_pair"] == "y"
    assert "gold" not in json.loads(second)


@pytest.mark.parametrize(
    ("head", "example", "value", "expected"),
    [
        ("regression", Example(id="0", text="a", label=0.5), 0.75,
         {"text": "a", "label": 0.75, "gold": 0.5}),
        ("tokens", Example(id="0", words=("Anna", "ran"), tags=(1, 0)), ("O", "O"),
         {"text": "Anna ran", "words": ["Anna", "ran"], "label": ["O", "O"],
          "gold": ["B-PER", "O"]}),
        ("tokens", Example(id="0", words=("in", "New", "York", ",", "Bob")),
         ("O", "B-LOC", "I-LOC", "O", "B-PER"),
         {"entities": [{"type": "LOC", "text": "New York", "start": 3, "end": 11},
                       {"type": "PER", "text": "Bob", "start": 14, "end": 17}]}),
        ("spans", Example(id="0", text="who?", text_pair="Anna ran", answers=()), "",
         {"text": "who?", "text_pair": "Anna ran", "label": "", "gold": []}),
        ("spans", Example(id="0", text="who?", text_pair="Anna ran",
                          answers=(Answer("Anna", 0), Answer("Anna", 0))), "ran",
         {"label": "ran", "gold": ["Anna"]}),
        ("choices", Example(id="0", text="a", choices=("b", "c"), label=1), "0",
         {"choices": ["b", "c"], "label": "0", "scores": {"0": 0.75, "1": 0.25}, "gold": "1"}),
        ("rerank", Example(id="0", text="a", choices=("b", "c"), relevance=(0.0, 2.0)), "0",
         {"text": "a", "passages": ["b", "c"], "label": "0", "scores": [0.75, 0.25],
          "ranks": [1, 2], "gold": [0, 2]}),
    ],
)  # fmt: skip
def test_every_head_has_its_text_and_label(
    head: str, example: Example, value: Any, expected: dict[str, Any]
) -> None:
    probabilities = (0.75, 0.25) if head in ("choices", "rerank") else ()
    prediction = Prediction(id="0", value=value, probabilities=probabilities)
    found = json.loads(json_lines(load_task(f"custom_{head}"), [example], [prediction]))
    assert expected.items() <= found.items()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write predictions"):
        written(tmp_path / "file", "cola", [Prediction(id="0", value="1")])

"""Scores by class, compared with scikit-learn and seqeval."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from seqeval.metrics import classification_report
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from megatron_deberta.cli.evaluate import describe_classes
from megatron_deberta.errors import DataError
from megatron_deberta.tasks import Example
from megatron_deberta.tasks.class_scores import (
    MAX_CLASSES,
    ClassScore,
    ClassScores,
    class_scores,
    recorded_thresholds,
)
from megatron_deberta.tasks.examples import Prediction
from tests.support.task_files import make_task


def classified(truth: list[int], found: list[int], labels: list[str]) -> ClassScores:
    task = make_task("classification", "accuracy", labels=labels)
    examples = [Example(id=str(i), text="x", label=label) for i, label in enumerate(truth)]
    predictions = [Prediction(id=str(i), index=c, value=labels[c]) for i, c in enumerate(found)]
    scores = class_scores(task, examples, predictions)
    assert scores is not None
    return scores


def test_classes_are_those_of_scikit_learn() -> None:
    random = np.random.default_rng(7)
    # The last class is neither labelled nor predicted.
    truth, found = random.integers(0, 4, (2, 60)).tolist()
    scores = classified(truth, found, ["a", "b", "c", "d", "e"])
    expected = precision_recall_fscore_support(truth, found, labels=range(5), zero_division=0)
    for each, *values in zip(scores.classes, *expected, strict=True):
        assert [each.precision, each.recall, each.f1, each.labelled] == pytest.approx(values)
    matrix = confusion_matrix(truth, found, labels=range(5)).tolist()
    assert scores.to_dict()["confusion"] == matrix


def tagged(labels: list[str], truth: list[list[int]], found: list[list[int]]) -> ClassScores:
    task = make_task("tokens", "accuracy", labels=labels)
    examples = [
        Example(id=str(i), words=("w",) * len(tags), tags=tuple(tags))
        for i, tags in enumerate(truth)
    ]
    predictions = [
        Prediction(id=str(i), value=tuple(labels[tag] for tag in tags))
        for i, tags in enumerate(found)
    ]
    scores = class_scores(task, examples, predictions)
    assert scores is not None
    return scores


def test_entities_are_those_of_seqeval() -> None:
    labels = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-MISC", "I-MISC"]
    random = np.random.default_rng(3)
    truth, found = random.integers(0, 7, (2, 20, 9)).tolist()
    found = [t if i % 3 else f for i, (t, f) in enumerate(zip(truth, found, strict=True))]
    scores = tagged(labels, truth, found)
    sides = [[[labels[tag] for tag in tags] for tags in side] for side in (truth, found)]
    expected = classification_report(*sides, output_dict=True, zero_division=0)
    assert scores.unit == "entities"
    assert [each.name for each in scores.classes] == ["LOC", "MISC", "PER"]
    for each in scores.classes:
        row = expected[each.name]
        values = [row["precision"], row["recall"], row["f1-score"], row["support"]]
        assert [each.precision, each.recall, each.f1, each.labelled] == pytest.approx(values)
    assert scores.confusion == ()


def test_words_are_counted_where_labels_have_no_scheme() -> None:
    scores = tagged(["O", "noun", "verb"], [[0, 1, 2, 1]], [[0, 1, 1, 2]])
    assert scores.unit == "words"
    counts = [(each.name, each.right, each.labelled, each.predicted) for each in scores.classes]
    assert counts == [("O", 1, 1, 1), ("noun", 1, 2, 2), ("verb", 0, 1, 1)]


def test_what_has_no_classes_has_no_scores() -> None:
    assert class_scores(make_task("regression", "pearson"), [], []) is None
    many = [str(number) for number in range(MAX_CLASSES + 1)]
    assert class_scores(make_task("classification", "accuracy", labels=many), [], []) is None
    example = Example(id="0", tags=(1,) * len(many))
    found = Prediction(id="0", value=(), probabilities=(0.0,) * len(many))
    several = make_task("multilabel", "micro_f1", labels=many)
    assert class_scores(several, [example], [found]) is not None


def test_recorded_thresholds_are_those_of_the_step(tmp_path: Path) -> None:
    assert recorded_thresholds(tmp_path, 1) == {}
    scores = [
        ClassScores("examples", (ClassScore("a", 1, 2, 3, value), ClassScore("b", 0, 0, 0, 0.5)))
        for value in (0.25, 0.75)
    ]
    lines = [json.dumps({"step": n, **each.to_dict()}) for n, each in enumerate(scores, 1)]
    path = tmp_path / "class_scores.jsonl"
    # An interrupted write leaves an incomplete line.
    path.write_text("\n".join([*lines, lines[1][:30]]))
    assert recorded_thresholds(tmp_path, 1) == {"a": 0.25, "b": 0.5}
    assert recorded_thresholds(tmp_path, 2) == {"a": 0.75, "b": 0.5}
    assert recorded_thresholds(tmp_path, 3) == {}
    path.write_text(lines[0].replace("0.25", "7") + "\n")
    with pytest.raises(DataError, match="class_scores.jsonl:1: .*threshold.*remove this line"):
        recorded_thresholds(tmp_path, 1)
    assert describe_classes(scores[0]).splitlines()[:2] == [
        "class   examples  predicted  precision  recall      F1  threshold",
        "a              2          3     0.3333  0.5000  0.4000     0.2500",
    ]


def test_text() -> None:
    scores = classified([0, 0, 0, 1, 1], [0, 0, 1, 1, 1], ["bad", "good"])
    assert describe_classes(scores).splitlines() == [
        "class   examples  predicted  precision  recall      F1",
        "bad            3          2     1.0000  0.6667  0.8000",
        "good           2          3     0.6667  1.0000  0.8000",
        "",
        "confusion matrix: rows are labels, columns are predictions",
        "       bad  good",
        "bad      2     1",
        "good     0     2",
    ]

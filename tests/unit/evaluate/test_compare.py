"""Significance tests: cases worked out by hand, SciPy, and metrics of explicit resamples."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from seqeval import metrics as seqeval_metrics
from sklearn import metrics

from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE, EXIT_USAGE, DataError
from megatron_deberta.evaluate import compare
from megatron_deberta.evaluate.compare import (
    Comparison,
    PairedTest,
    format_comparison,
    paired_test,
    randomisation_p,
    read_predictions,
    welch_p,
)
from megatron_deberta.evaluate.splits import Split
from megatron_deberta.tasks import Example, load_task, read_examples
from megatron_deberta.tasks.examples import Answer, Prediction
from megatron_deberta.tasks.leaderboard import json_lines
from megatron_deberta.tasks.metrics import (
    CorrelationMetric,
    CountMetric,
    PairedMetric,
    paired_metric,
)
from tests.support.task_files import make_task
from tests.support.tiny_task import write_task

RESAMPLES = 20_000
FIVE_SEEDS = (0.861, 0.862, 0.863, 0.864, 0.865)


def accuracy(right: Sequence[float]) -> CountMetric:
    """Return the mean of a score per example."""
    counts = np.stack([np.array(right, np.float64), np.ones(len(right))], axis=1)
    return CountMetric(counts, lambda sums: sums[:, 0] / sums[:, 1])


def test_randomisation_of_three_examples_by_hand() -> None:
    # Of the eight exchanges, the observed difference of 1 is reached by none and by all.
    a, b = accuracy([0, 0, 0]), accuracy([1, 1, 1])
    assert randomisation_p([a], [b], resamples=RESAMPLES, seed=0) == pytest.approx(0.25, abs=0.01)
    assert randomisation_p([a], [a], resamples=100, seed=0) == 1.0


def test_randomisation_is_that_of_scipy() -> None:
    random = np.random.default_rng(3)
    a, b = random.normal(size=9), random.normal(0.3, size=9)
    exact = stats.permutation_test(
        (a, b), lambda x, y: np.mean(y) - np.mean(x), permutation_type="samples", n_resamples=1 << 9
    )
    p = randomisation_p([accuracy(a)], [accuracy(b)], resamples=RESAMPLES, seed=1)
    assert 0.02 < exact.pvalue < 0.5
    assert p == pytest.approx(exact.pvalue, abs=0.01)


def test_bootstrap_of_two_examples_by_hand() -> None:
    # Differences 1 and 0: a resample's mean is 0, 1/2 or 1 with probability 1/4, 1/2, 1/4.
    found = paired_test([accuracy([0, 0])], [accuracy([1, 0])], resamples=RESAMPLES)
    assert found.difference == 0.5
    assert (found.low, found.high) == (0, 1)
    assert found.bootstrap_p == pytest.approx(2 * 0.25, abs=0.02)
    same = paired_test([accuracy([1, 0])], [accuracy([1, 0])], resamples=100)
    assert same == PairedTest(0, 0, 0, 1, 1)


def test_bootstrap_interval_is_that_of_scipy() -> None:
    random = np.random.default_rng(5)
    a, b = random.random(80), random.random(80) + 0.1
    expected = stats.bootstrap(
        (a, b), lambda x, y, axis: (y - x).mean(axis=axis), paired=True, vectorized=True,
        method="percentile", n_resamples=RESAMPLES, rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    found = paired_test([accuracy(a)], [accuracy(b)], resamples=RESAMPLES)
    assert found.low == pytest.approx(expected.low, abs=0.004)
    assert found.high == pytest.approx(expected.high, abs=0.004)


def test_several_runs_count_by_their_mean() -> None:
    a = [accuracy([0, 0, 1, 0]), accuracy([0, 1, 1, 0])]
    b = [accuracy([1, 1, 1, 0]), accuracy([1, 1, 1, 1]), accuracy([1, 0, 1, 1])]
    found = paired_test(a, b, resamples=2000)
    assert found.difference == pytest.approx(np.mean([3, 4, 3]) / 4 - np.mean([1, 2]) / 4)
    # All 16 exchanges of the sides' mean scores of each example.
    differences = np.array([3, 2, 3, 2]) / 3 - np.array([0, 1, 2, 0]) / 2
    every = [abs(np.mean(differences * signs)) for signs in itertools.product((-1, 1), repeat=4)]
    exact = np.mean(np.array(every) >= abs(differences.mean()) - 1e-12)
    p = randomisation_p(a, b, resamples=RESAMPLES, seed=0)
    assert p == pytest.approx(exact, abs=0.01)
    # The order of the runs means nothing.
    reverse = randomisation_p(a[::-1], b[::-1], resamples=RESAMPLES, seed=0)
    assert reverse == pytest.approx(p, abs=1e-12)


def test_randomisation_of_one_against_two_runs_is_that_of_scipy() -> None:
    """Exchanging the sides' means, where a second run of one side is much better than its first."""
    random = np.random.default_rng(11)
    a, first = (random.random((2, 12)) < 0.5).astype(float)
    second = np.maximum(a, random.random(12) < 0.8).astype(float)
    exact = stats.permutation_test(
        (a, (first + second) / 2), lambda x, y: np.mean(y) - np.mean(x),
        permutation_type="samples", n_resamples=1 << 12,
    )  # fmt: skip
    runs = [accuracy(first), accuracy(second)]
    p = randomisation_p([accuracy(a)], runs, resamples=RESAMPLES, seed=2)
    assert p == pytest.approx(exact.pvalue, abs=0.01)
    for run in (first, second):
        alone = randomisation_p([accuracy(a)], [accuracy(run)], resamples=RESAMPLES, seed=2)
        assert abs(alone - exact.pvalue) > 0.05
    swapped = randomisation_p(runs, [accuracy(a)], resamples=RESAMPLES, seed=2)
    assert swapped == pytest.approx(p, abs=1e-12)


def test_results_depend_on_the_seed_only() -> None:
    random = np.random.default_rng(1)
    a, b = accuracy(random.random(50)), accuracy(random.random(50))
    first = paired_test([a], [b], resamples=500, seed=4)
    assert paired_test([a], [b], resamples=500, seed=4) == first
    assert paired_test([a], [b], resamples=500, seed=5) != first


def test_welch_by_hand() -> None:
    # Variances 1 and 20/3, so t = -3 / sqrt(2), with (1/3 + 5/3)^2 / (1/18 + 25/27) degrees.
    degrees = 4 / (1 / 18 + 25 / 27)
    expected = 2 * stats.t.sf(3 / math.sqrt(2), degrees)
    assert welch_p([1, 2, 3], [2, 4, 6, 8]) == pytest.approx(expected, rel=1e-12)
    assert welch_p([1, 2], [3]) is None
    assert welch_p([1, 1], [1, 1]) == 1
    assert welch_p([1, 1], [2, 2]) == 0


def explicit(weights: Any) -> list[int]:
    """Return the examples of a resample."""
    return [int(i) for i in np.repeat(np.arange(len(weights)), weights.astype(int))]


@pytest.mark.parametrize("name", ["accuracy", "f1", "macro_f1", "matthews"])
def test_metrics_of_classes(name: str) -> None:
    task = make_task("classification", name, labels=["x", "y", "z"], positive_label="y")
    random = np.random.default_rng(0)
    truth, found, other = random.integers(0, 3, (3, 30))
    examples = [Example(id=str(i), label=int(label)) for i, label in enumerate(truth)]

    def metric(classes: Any) -> PairedMetric:
        predictions = [
            Prediction(id=e.id, index=int(c), value="")
            for e, c in zip(examples, classes, strict=True)
        ]
        return paired_metric(task, name, examples, predictions, has_best_text=True)

    def expected(chosen: Any, classes: Any) -> float:
        sides = truth[chosen], classes[chosen]
        values = {
            "accuracy": metrics.accuracy_score(*sides),
            "f1": metrics.f1_score(*(side == 1 for side in sides), zero_division=0),
            "macro_f1": metrics.f1_score(*sides, labels=range(3), average="macro", zero_division=0),
            "matthews": metrics.matthews_corrcoef(*sides),
        }
        return float(values[name])

    first = metric(found)
    assert first.num_units == 30
    assert first.value() == pytest.approx(expected(slice(None), found))
    weights = random.multinomial(30, [1 / 30] * 30, size=5).astype(np.float64)
    values = [expected(explicit(row), found) for row in weights]
    assert first.resampled(weights) == pytest.approx(values)
    mask = random.random((5, 30)) < 0.5
    values = [expected(slice(None), np.where(row, other, found)) for row in mask]
    assert first.swapped(metric(other), mask) == pytest.approx(values)


@pytest.mark.parametrize("name", ["pearson", "spearman", "pearson_spearman"])
def test_correlations(name: str) -> None:
    random = np.random.default_rng(0)
    # With ties.
    truth, found, other = random.integers(0, 6, (3, 25)).astype(np.float64)
    metric = CorrelationMetric(name, truth, found)

    def expected(truth: Any, found: Any) -> float:
        pearson, spearman = stats.pearsonr(truth, found), stats.spearmanr(truth, found)
        values = {"pearson": pearson.statistic, "spearman": spearman.statistic}
        return float(values.get(name, sum(values.values()) / 2))

    assert metric.value() == pytest.approx(expected(truth, found))
    weights = random.multinomial(25, [1 / 25] * 25, size=5).astype(np.float64)
    chosen = [explicit(row) for row in weights]
    values = [expected(truth[c], found[c]) for c in chosen]
    assert metric.resampled(weights) == pytest.approx(values)
    mask = random.random((5, 25)) < 0.5
    values = [expected(truth, np.where(m, other, found)) for m in mask]
    assert metric.swapped(CorrelationMetric(name, truth, other), mask) == pytest.approx(values)
    constant = CorrelationMetric(name, truth, np.full(25, 0.1))
    assert constant.resampled(weights).tolist() == [0] * 5


@pytest.mark.parametrize(
    "name", ["f1", "precision", "recall", "accuracy", "token_f1", "token_precision", "token_recall"]
)
def test_metrics_of_tags(name: str) -> None:
    labels = ["O", "B-PER", "I-PER", "B-LOC"]
    task = make_task("tokens", name, labels=labels)
    random = np.random.default_rng(2)
    tags = random.integers(0, 4, (12, 2, 7))
    examples = [
        Example(id=str(i), words=("w",) * 7, tags=tuple(pair[0].tolist()), breaks=(4,))
        for i, pair in enumerate(tags)
    ]
    predictions = [
        Prediction(id=str(i), value=tuple(labels[t] for t in pair[1]))
        for i, pair in enumerate(tags)
    ]
    metric = paired_metric(task, name, examples, predictions, has_best_text=True)
    weights = random.multinomial(12, [1 / 12] * 12, size=5).astype(np.float64)
    for row, value in zip(weights, metric.resampled(weights), strict=True):
        sides: list[list[list[str]]] = []
        for side in (0, 1):
            names = [[labels[t] for t in tags[i, side]] for i in explicit(row)]
            sides.append([part for each in names for part in (each[:4], each[4:])])
        words = [[tag for tags in side for tag in tags] for side in sides]
        if name == "accuracy":
            expected = metrics.accuracy_score(*words)
        elif name.startswith("token_"):
            compute = getattr(metrics, f"{name.removeprefix('token_')}_score")
            expected = compute(*words, labels=labels[1:], average="micro", zero_division=0)
        else:
            expected = getattr(seqeval_metrics, f"{name}_score")(*sides, zero_division=0)
        assert value == pytest.approx(expected)


def test_metrics_of_groups() -> None:
    groups = ["a", "a", "b", "b", "b", "c"]
    examples = [Example(id=str(i), label=1, group=group) for i, group in enumerate(groups)]
    found = [1, 1, 1, 0, 1, 0]
    predictions = [Prediction(id=str(i), index=c, value="") for i, c in enumerate(found)]
    for name, expected in (("group_exact", [1, 0, 0]), ("gender_parity", [1, 0, 1])):
        task = make_task("classification", name, labels=["n", "y"])
        metric = paired_metric(task, name, examples, predictions, has_best_text=True)
        # The groups are resampled, not their members.
        assert metric.num_units == 3
        assert metric.resampled(np.eye(3)).tolist() == expected


def test_metrics_of_answers_with_threshold() -> None:
    task = make_task("spans", "best_f1", "f1", "exact", "best_exact", unanswerable=True)
    truth = [(Answer("a red fox", 0),), (), (Answer("home", 0),), ()]
    examples = [
        Example(id=str(i), text="q", text_pair="c", answers=answers)
        for i, answers in enumerate(truth)
    ]
    texts, nulls = ["red dog", "far", "home", "it"], [-2.0, 1.5, 1.0, 2.0]
    predictions = [
        Prediction(id=str(i), value=text, null_score=null)
        for i, (text, null) in enumerate(zip(texts, nulls, strict=True))
    ]

    def scores(name: str, has_best_text: bool = True) -> list[float]:
        metric = paired_metric(task, name, examples, predictions, has_best_text=has_best_text)
        values: list[float] = metric.resampled(np.eye(4)).tolist()
        return values

    # At 0, "home" counts as no answer; at the best threshold 1, it is given.
    assert scores("f1") == [0.5, 1, 0, 1]
    assert scores("best_f1") == [0.5, 1, 1, 1]
    assert scores("exact") == [0, 1, 0, 1]
    assert scores("best_exact") == [0, 1, 1, 1]
    assert scores("f1", has_best_text=False) == [0.5, 0, 1, 0]


def test_table_has_the_layout_of_the_papers_table_14() -> None:
    test = PairedTest(0.014, 0.006, 0.021, 0.0012, 0.0009)
    base = {"split": "dev", "metric": "accuracy", "num_examples": 9815, "examples": test}
    columns = [
        Comparison(task="mnli", a=(0.847, 0.85, 0.849), b=FIVE_SEEDS, seeds_p=0.0204, **base),
        Comparison(task="sst2", a=(0.9,), b=(0.91,), seeds_p=None, **base),
    ]
    text = format_comparison(("RoBERTa", "DeBERTa"), columns)
    rows = [line.split("  ") for line in text.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[:5] == [
        ["Model", "mnli dev", "sst2 dev"],
        ["accuracy (Min/Max/Avg)", "accuracy (Min/Max/Avg)"],
        ["RoBERTa", "84.7/85.0/84.9", "90.0/90.0/90.0"],
        ["DeBERTa", "86.1/86.5/86.3", "91.0/91.0/91.0"],
        ["p-Value", "0.02", "-"],
    ]
    assert ["95 % interval", "+0.60 to +2.10", "+0.60 to +2.10"] in cells
    assert "no test result" in text


@pytest.fixture
def predictions(tmp_path: Path) -> Path:
    """Prediction files for the tiny task: ``a.jsonl`` always says good, ``b.jsonl`` is right."""
    data = write_task(tmp_path / "data")
    labels = [line.split("\t")[1] for line in (data / "dev.tsv").read_text().splitlines()[1:]]
    for name, values in (("a", ["good"] * len(labels)), ("b", labels)):
        lines = [
            {"id": str(i), "index": ["bad", "good"].index(v), "value": v}
            for i, v in enumerate(values)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def test_prediction_files_are_compared(
    predictions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(predictions / "a.jsonl"), str(predictions / "b.jsonl")]
    options = ["--task", str(predictions / "data" / "task.yaml"), "--data"]
    arguments = ["compare", *files, *options, str(predictions / "data")]
    output = predictions / "out.json"
    assert main([*arguments, "--output", str(output), "--resamples", "500"]) == EXIT_DONE
    (content,) = json.loads(output.read_text())
    assert content["b"] == [1.0]
    assert content["a"][0] == pytest.approx(1 - content["examples"]["difference"])
    assert content["seeds_p"] is None
    shown = capsys.readouterr().out
    assert main([*arguments, "--resamples", "500"]) == EXIT_DONE
    assert capsys.readouterr().out == shown
    assert "100.0/100.0/100.0" in shown

    assert main(["compare", *files]) == EXIT_USAGE
    assert "need --task and --data" in capsys.readouterr().err
    (predictions / "b.jsonl").write_text('{"id": "0", "index": 1, "value": "good"}\n')
    assert main(arguments) == EXIT_USAGE
    error = capsys.readouterr().err
    assert "1 predictions for 11 examples of task tiny, none for 1; predict the same" in error
    (predictions / "b.jsonl").write_text('{"id": 0}\n')
    assert main(arguments) == EXIT_USAGE
    assert "b.jsonl:1: not a prediction" in capsys.readouterr().err
    assert main(["compare", files[0], str(predictions / "none")]) == EXIT_USAGE
    assert "no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "0"}, "b.jsonl:2: id '0' occurs twice"),
        ({"index": 0}, "value 'good' with index 0 is not a prediction of task tiny"),
        ({"index": 7}, "with index 7 is not a prediction"),
        ({"index": -1}, "with index -1 is not a prediction"),
        ({"value": 0.5}, "value 0.5 with index 1 is not a prediction"),
    ],
)
def test_predictions_of_other_labels_are_refused(
    change: dict[str, Any], message: str, predictions: Path
) -> None:
    """Index and value that disagree are those of a task with another order of labels."""
    path = predictions / "b.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1] = {**lines[1], "index": 1, "value": "good", **change}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = load_task(str(predictions / "data" / "task.yaml"))
    with pytest.raises(DataError, match=message):
        read_predictions(path, task, read_examples(task, str(predictions / "data"), "dev"))


def test_scores_of_passages_are_read_again(tmp_path: Path) -> None:
    task, path = load_task("custom_rerank"), tmp_path / "a.jsonl"
    example = Example(id="q", text="a", choices=("b", "c"), relevance=(0.0, 1.0))
    assert compare._labels([example]) != compare._labels([replace(example, relevance=(1.0, 0.0))])
    prediction = Prediction(id="q", index=1, value="1", probabilities=(0.25, 0.75))
    path.write_bytes(json_lines(task, [example], [prediction]))
    assert read_predictions(path, task, [example]) == [prediction]
    for scores in ([0.25], [0.25, None]):
        path.write_text(json.dumps({"id": "q", "label": "1", "index": 1, "scores": scores}))
        with pytest.raises(DataError, match="a.jsonl:1"):
            read_predictions(path, task, [example])


def test_a_score_may_stand_beside_its_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "0", "text": "of the example", "value": 3}\n')
    task, examples = make_task("regression", "pearson"), [Example(id="0", label=1.0)]
    assert read_predictions(tmp_path / "a.jsonl", task, examples)[0].value == 3


def test_runs_of_one_side_have_the_same_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over runs of different examples is no score, and resamples would mix them."""
    task = make_task("classification", "accuracy", labels=["x", "y"])
    outputs = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    encoded: Any = SimpleNamespace(
        num_rows=2, num_examples=2, input_ids=range(4), example_offsets=np.arange(3)
    )
    labels = {"a": (0, 1), "b": (0, 1), "c": (1, 0)}

    def read(run: Any, split: str, data: str) -> tuple[Split, Any]:
        pairs = enumerate(labels[run.folder.name])
        examples = [Example(id=str(number), label=label) for number, label in pairs]
        return Split(examples, encoded), outputs

    monkeypatch.setattr(compare, "read_outputs", read)
    runs: list[Any] = [SimpleNamespace(folder=Path(name), task=task) for name in labels]
    found = compare._side_of_runs(runs[:2], "dev", "")
    assert [metric.value() for metric in found.metrics] == [1, 1]
    with pytest.raises(DataError, match="c and a have different examples of task classification"):
        compare._side_of_runs(runs, "dev", "")


@pytest.mark.parametrize(
    ("head", "value"),
    [
        ("regression", "NaN"), ("regression", "Infinity"), ("regression", '"3"'),
        ("tokens", '["B-Y"]'),
    ],
)  # fmt: skip
def test_values_that_the_task_does_not_have_are_no_predictions(
    head: str, value: str, tmp_path: Path
) -> None:
    is_score = head == "regression"
    task = make_task(head, "pearson") if is_score else make_task(head, "f1", labels=["O", "B-X"])
    (tmp_path / "a.jsonl").write_text(f'{{"id": "0", "value": {value}}}\n')
    with pytest.raises(DataError, match="not a prediction"):
        read_predictions(tmp_path / "a.jsonl", task, [Example(id="0", words=("a",))])


def test_options_of_files_are_refused_for_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    run = str(tmp_path / "run")
    assert main(["compare", run, run, "--task", "sst2"]) == EXIT_USAGE
    assert "--task is for prediction files; runs have their own" in capsys.readouterr().err

"""Comparison of two sides, runs or prediction files, of one or several tasks.

Sources: paired bootstrap: Efron and Tibshirani (1993), chapters 13 and 16, as in Koehn (2004);
approximate randomisation: Noreen (1989), chapter 2, as in Yeh (2000); t-test: Welch (1947).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import orjson

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.evaluate.outputs import CONFIG_FILE, FinetunedRun, find_runs, read_outputs
from megatron_deberta.parsing import conform, parse_json
from megatron_deberta.tasks import read_examples
from megatron_deberta.tasks.examples import Example, Prediction
from megatron_deberta.tasks.metrics import Floats, PairedMetric, paired_metric
from megatron_deberta.tasks.records import read_bytes
from megatron_deberta.tasks.scoring import predict, require_labels
from megatron_deberta.tasks.task import DEV, SCORE_HEADS, TaskConfig, load_task

SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of two sides on one task.

    Attributes:
        task: name of the task.
        split: name of the split.
        metric: the task's first metric.
        num_examples: number of examples.
        a: score of each run of side A.
        b: score of each run of side B.
        examples: tests over examples.
        seeds_p: p-value of Welch's t-test over runs; None: a side has fewer than two.
    """

    task: str
    split: str
    metric: str
    num_examples: int
    a: tuple[float, ...]
    b: tuple[float, ...]
    examples: PairedTest
    seeds_p: float | None


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison on one task.

    Attributes:
        task: the task.
        examples: the labelled examples.
        metrics: the metric of each run.
    """

    task: TaskConfig
    examples: Sequence[Example]
    metrics: tuple[PairedMetric, ...]


def sides_of_runs(a: Path, b: Path, split: str, data: str) -> Iterator[tuple[Side, Side]]:
    """Yield both sides of every task that the runs of two folders have.

    Args:
        a: run, folder of runs or search.
        b: the same.
        split: labelled split.
        data: folder of the task's files; empty: that of each run.

    Raises:
        ConfigError: no task in common.
        DataError: the runs of a side have different examples.
    """
    sides = [
        {name: list(runs) for name, runs in itertools.groupby(found, lambda run: run.task.name)}
        for found in map(find_runs, (a, b))
    ]
    tasks = [name for name in sides[0] if name in sides[1]]
    if not tasks:
        raise ConfigError(f"{a} has runs of {', '.join(sides[0])}, {b} of {', '.join(sides[1])}")
    for name in tasks:
        first, second = (_side_of_runs(side[name], split, data) for side in sides)
        yield first, second


def sides_of_files(
    a: Path, b: Path, split: str, data: str, task_name: str
) -> Iterator[tuple[Side, Side]]:
    """Yield both sides of prediction files.

    Args:
        a: file of ``predict``, or folder of such files, one per run.
        b: the same.
        split: labelled split that the files predict.
        data: folder of the task's files.
        task_name: task file or name of a packaged task.

    Raises:
        DataError: a file is malformed, or does not predict the examples of the split.
    """
    task = load_task(task_name)
    if split not in task.splits:
        raise ConfigError(f"--split {split}: task {task.name} has {', '.join(task.splits)}")
    examples = read_examples(task, data, split)
    sides = []
    for path in (a, b):
        files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        predictions = [read_predictions(file, task, examples) for file in files]
        require_labels(task, examples)
        metrics = (
            paired_metric(task, task.metrics[0], examples, each, has_best_text=False)
            for each in predictions
        )
        sides.append(Side(task, examples, tuple(metrics)))
    yield sides[0], sides[1]


def holds_predictions(path: Path) -> bool:
    """Return whether a path is a prediction file or a folder of such files."""
    # A run has files of this suffix, too.
    is_run = (path / CONFIG_FILE).exists()
    return path.is_file() or (any(path.glob(f"*{SUFFIX}")) and not is_run)


def compare(a: Side, b: Side, *, split: str, resamples: int, seed: int) -> Comparison:
    """Compare two sides on the same examples.

    Args:
        a: first side.
        b: second side.
        split: name of the split.
        resamples: number of resamples of the paired test.
        seed: of the resamples.

    Raises:
        DataError: they have different examples.
    """
    if _labels(a.examples) != _labels(b.examples):
        raise DataError(
            f"task {a.task.name}: the sides have different examples ({len(a.examples)} and "
            f"{len(b.examples)}); give the same files to both with --data"
        )
    scores_a, scores_b = (tuple(m.value() for m in side.metrics) for side in (a, b))
    return Comparison(
        task=a.task.name,
        split=split,
        metric=a.task.metrics[0],
        num_examples=len(a.examples),
        a=scores_a,
        b=scores_b,
        examples=paired_test(a.metrics, b.metrics, resamples=resamples, seed=seed),
        seeds_p=welch_p(scores_a, scores_b),
    )


def _labels(examples: Sequence[Example]) -> list[tuple[object, ...]]:
    return [(e.id, e.label, e.tags, e.answers, e.relevance) for e in examples]


def _side_of_runs(runs: Sequence[FinetunedRun], split: str, data: str) -> Side:
    task, examples = runs[0].task, list[Example]()
    metrics: list[PairedMetric] = []
    for run in runs:
        found, outputs = read_outputs(run, split, data)
        if metrics and _labels(examples) != _labels(found.examples):
            raise DataError(
                f"{run.folder} and {runs[0].folder} have different examples of task {task.name}; "
                "give the same files to all runs with --data"
            )
        examples = list(found.examples)
        predictions = predict(
            run.task, examples, found.encoded, outputs, null_threshold=float("inf")
        )
        require_labels(task, examples)
        name = task.metrics[0]
        metrics.append(paired_metric(task, name, examples, predictions, has_best_text=True))
    return Side(task, examples, tuple(metrics))


def read_predictions(path: Path, task: TaskConfig, examples: Sequence[Example]) -> list[Prediction]:
    """Read a file of ``predict``, which must have a line per example, in any order.

    Args:
        path: the file.
        task: that was predicted.
        examples: of the split.

    Returns:
        The predictions, in the order of ``examples``.

    Raises:
        DataError: it is malformed, or has other examples, or predictions of another task.
    """
    what, remedy = "a prediction", "write it again with predict"
    known = {field.name for field in fields(Prediction)}
    by_id = {example.id: example for example in examples}
    found: dict[str, Prediction] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        place = f"{path}:{number}"
        values = parse_json(line, dict[str, Any], place, what, remedy=remedy)
        # The others repeat the example. Earlier releases also wrote value and probabilities.
        own = {name: value for name, value in values.items() if name in known}
        own.setdefault("value", values.get("label"))
        scores = values.get("scores")
        if isinstance(scores, dict):
            scores = [*scores.values()]
        own.setdefault("probabilities", scores or [])
        prediction = conform(own, Prediction, place, what, remedy=remedy)
        if prediction.id in found:
            raise DataError(f"{place}: id {prediction.id!r} occurs twice; {remedy}")
        if prediction.id in by_id and not _fits(task, by_id[prediction.id], prediction):
            raise DataError(
                f"{place}: value {prediction.value!r} with index {prediction.index} is not a "
                f"prediction of task {task.name}; give the task that was predicted"
            )
        found[prediction.id] = prediction
    missing = [example.id for example in examples if example.id not in found]
    if missing or len(found) != len(examples):
        raise DataError(
            f"{path}: {len(found)} predictions for {len(examples)} examples of task {task.name}"
            f"{f', none for {missing[0]}' if missing else ''}; predict the same split"
        )
    return [found[example.id] for example in examples]


def _fits(task: TaskConfig, example: Example, prediction: Prediction) -> bool:
    """Return whether a prediction is one of the task's head and labels."""
    value, index = prediction.value, prediction.index
    if task.head in SCORE_HEADS:
        return isinstance(value, float) and math.isfinite(value)
    if task.head == "spans":
        return isinstance(value, str)
    if task.head == "rerank":
        scores = prediction.probabilities
        return len(scores) == len(example.choices) and all(map(math.isfinite, scores))
    if task.head == "tokens":
        is_right_size = isinstance(value, tuple) and len(value) == len(example.words)
        return is_right_size and set(cast("tuple[str, ...]", value)) <= set(task.labels)
    if task.head == "multilabel":
        return isinstance(value, tuple) and set(value) <= set(task.labels)
    size = len(example.choices) if task.head == "choices" else len(task.labels)
    names = task.labels or tuple(map(str, range(size)))
    return 0 <= index < size and value == names[index]


def to_json(comparisons: Sequence[Comparison]) -> bytes:
    """Return comparisons as JSON."""
    return orjson.dumps(comparisons, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def format_comparison(names: tuple[str, str], comparisons: Sequence[Comparison]) -> str:
    """Format minimum, maximum and mean of both models in percent, and the p-values.

    Args:
        names: names of the models.
        comparisons: a column each.
    """
    a, b = names
    rows = [
        ["Model", *(f"{c.task} {c.split}" for c in comparisons)],
        ["", *(f"{c.metric} (Min/Max/Avg)" for c in comparisons)],
        [a, *(_range(c.a) for c in comparisons)],
        [b, *(_range(c.b) for c in comparisons)],
        ["p-Value", *("-" if c.seeds_p is None else _p(c.seeds_p) for c in comparisons)],
        ["", *("" for _ in comparisons)],
        ["runs", *(f"{len(c.a)} and {len(c.b)}" for c in comparisons)],
        ["examples", *(f"{c.num_examples:,}" for c in comparisons)],
        ["difference", *(f"{100 * c.examples.difference:+.2f}" for c in comparisons)],
        ["95 % interval", *(_interval(c) for c in comparisons)],
        ["p, paired bootstrap", *(_p(c.examples.bootstrap_p) for c in comparisons)],
        ["p, randomisation", *(_p(c.examples.randomisation_p) for c in comparisons)],
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    notes = [
        "",
        "p-Value: Welch's t-test over the runs, which differ in their seeds; - with fewer than two",
        "runs. The other rows are of the examples: second model minus first, mean over runs.",
    ]
    if any(c.split == DEV for c in comparisons):
        notes.append(f"The split {DEV} selected the checkpoints; this is no test result.")
    return "\n".join([*lines, *notes])


def _range(scores: Sequence[float]) -> str:
    values = min(scores), max(scores), sum(scores) / len(scores)
    return "/".join(f"{100 * value:.1f}" for value in values)


def _interval(comparison: Comparison) -> str:
    tests = comparison.examples
    return f"{100 * tests.low:+.2f} to {100 * tests.high:+.2f}"


def _p(value: float) -> str:
    return f"{value:.2g}"


_CHUNK = 256
"""Resamples that are computed together."""


_EQUAL = 1e-12
"""Differences that are closer are equal."""


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Result of the tests over examples, for the difference B - A of the mean over runs.

    Attributes:
        difference: on all examples.
        low: lower bound of its 95 % confidence interval (percentiles of the bootstrap).
        high: upper bound.
        bootstrap_p: two-sided p-value of the paired bootstrap.
        randomisation_p: two-sided p-value of approximate randomisation.
    """

    difference: float
    low: float
    high: float
    bootstrap_p: float
    randomisation_p: float


def paired_test(
    a: Sequence[PairedMetric], b: Sequence[PairedMetric], *, resamples: int = 10_000, seed: int = 0
) -> PairedTest:
    """Test whether two sides differ, by resampling the examples.

    Every resample applies to all runs of both sides, and a side's metric is the mean over its
    runs. Randomisation exchanges an example's predictions between the sides: between every run of
    one side and every run of the other one, and the difference is the mean over these pairs. Of a
    metric that is a mean over examples, that is to exchange the sides' means for the example.

    Args:
        a: metric of each run of side A.
        b: metric of each run of side B.
        resamples: number of resamples of each test.
        seed: of the random numbers.
    """
    number = a[0].num_units
    differences = np.concatenate(
        [
            _mean([m.resampled(w) for m in b]) - _mean([m.resampled(w) for m in a])
            for w in _weights(number, resamples, seed)
        ]
    )
    low, high = np.percentile(differences, [2.5, 97.5])
    below = 1 + np.count_nonzero(differences <= _EQUAL)
    above = 1 + np.count_nonzero(differences >= -_EQUAL)
    return PairedTest(
        difference=math.fsum(m.value() for m in b) / len(b)
        - math.fsum(m.value() for m in a) / len(a),
        low=float(low),
        high=float(high),
        bootstrap_p=float(min(1.0, 2 * min(below, above) / (resamples + 1))),
        randomisation_p=randomisation_p(a, b, resamples=resamples, seed=seed),
    )


def randomisation_p(
    a: Sequence[PairedMetric], b: Sequence[PairedMetric], *, resamples: int, seed: int
) -> float:
    """Return the two-sided p-value of approximate randomisation; see ``paired_test``."""
    pairs = list(itertools.product(a, b))
    observed = abs(math.fsum(y.value() - x.value() for x, y in pairs)) / len(pairs)
    exceeding = 0
    for mask in _masks(a[0].num_units, resamples, seed):
        differences = _mean([y.swapped(x, mask) - x.swapped(y, mask) for x, y in pairs])
        exceeding += int(np.count_nonzero(np.abs(differences) >= observed - _EQUAL))
    return (1 + exceeding) / (resamples + 1)


def welch_p(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the two-sided p-value of Welch's t-test; None: a side has fewer than two runs.

    The p-value is 1 if all scores are equal, and 0 if each side is constant and they differ.
    """
    from scipy import stats

    if min(len(a), len(b)) < 2:
        return None
    if np.ptp(a) == 0 and np.ptp(b) == 0:
        return float(a[0] == b[0])
    return float(stats.ttest_ind(a, b, equal_var=False).pvalue)


def _mean(values: Sequence[Floats]) -> Floats:
    mean: Floats = np.mean(values, axis=0)
    return mean


def _weights(number: int, resamples: int, seed: int) -> Iterator[Floats]:
    """Yield how often each unit occurs in each resample, ``[C, n]``."""
    generator = np.random.default_rng([seed, 0])
    for first in range(0, resamples, _CHUNK):
        size = min(_CHUNK, resamples - first)
        drawn = generator.integers(number, size=(size, number)) + number * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * number)
        yield counts.reshape(size, number).astype(np.float64)


def _masks(number: int, resamples: int, seed: int) -> Iterator[npt.NDArray[np.bool_]]:
    """Yield which units are exchanged in each resample, ``[C, n]``."""
    generator = np.random.default_rng([seed, 1])
    for first in range(0, resamples, _CHUNK):
        yield generator.random((min(_CHUNK, resamples - first), number)) < 0.5

"""Our metrics beside scikit-learn, scipy, seqeval and conlleval, on random and on edge inputs."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
from scipy import stats
from seqeval.metrics import sequence_labeling as seqeval
from sklearn import metrics as sklearn

from megatron_deberta.tasks.examples import Example, Prediction
from megatron_deberta.tasks.metrics import paired_metric
from megatron_deberta.tasks.task import TaskConfig
from tests.support.judges import record
from tests.support.task_files import make_task

pytestmark = pytest.mark.slow

LIMIT = 1e-12
Labels = Sequence[int]


@cache
def task_of(head: str, name: str, labels: tuple[str, ...], positive: str) -> TaskConfig:
    fields = {"labels": list(labels)} if labels else {}
    return make_task(head, name, **fields, **({"positive_label": positive} if positive else {}))


def value_of(task: TaskConfig, examples: list[Example], predictions: list[Prediction]) -> float:
    """Return our value of a task's only metric."""
    (name,) = task.metrics
    return paired_metric(task, name, examples, predictions, has_best_text=True).value()


def value_of_classes(task: TaskConfig, truth: Labels, found: Labels) -> float:
    examples = [Example(id="", label=label) for label in truth]
    return value_of(task, examples, [Prediction(id="", index=each, value="") for each in found])


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> Iterator[Callable[[float, float], None]]:
    """Return a function that compares two values; the largest difference is recorded."""
    differences: list[float] = []

    def check(ours: float, theirs: float) -> None:
        assert ours == pytest.approx(theirs, abs=LIMIT, rel=LIMIT)
        differences.append(abs(ours - theirs))

    yield check
    judge, release, compared = request.node.stash.get(ROW, (None, "", ""))
    assert len(differences) > 100
    assert judge is not None
    worst = f"{max(differences):.0e}" if any(differences) else "0"
    record(judge, release, compared, worst, f"{LIMIT:.0e}", len(differences))


ROW = pytest.StashKey[tuple[str, str, str]]()


def edge_labels(classes: int) -> Iterator[tuple[Labels, Labels]]:
    """Yield inputs of which some metric is not defined or extreme."""
    everything = range(classes)
    for one, other in itertools.product(everything, repeat=2):
        yield [one], [other]
        yield [one] * 5, [other] * 5
        yield [one] * 5 + [other], [other] * 6
        yield [other] * 6, [one] * 5 + [other]
    yield list(everything), list(everything)
    yield list(everything), list(reversed(everything))
    yield list(everything), [*everything][1:] + [0]


def labels_of(classes: int) -> Iterator[tuple[Labels, Labels]]:
    yield from edge_labels(classes)
    random = np.random.default_rng(classes)
    for size in (1, 2, 3, 10, 50, 400):
        for skew in (0.2, 1.0, 5.0):
            for _ in range(3):
                shares = random.dirichlet([skew] * classes)
                truth, other = random.choice(classes, (2, size), p=shares)
                found = np.where(random.random(size) < 0.6, truth, other)
                yield truth.tolist(), found.tolist()


@pytest.mark.parametrize("name", ["accuracy", "f1", "macro_f1", "matthews"])
def test_metrics_of_classes(
    name: str, compare: Callable[[float, float], None], request: pytest.FixtureRequest
) -> None:
    """A metric that is not defined is 0, as scikit-learn's with ``zero_division=0``."""
    request.node.stash[ROW] = (
        "scikit-learn", version("scikit-learn"),
        f"{name} of 2, 3 and 5 classes, random and edge inputs",
    )  # fmt: skip
    for classes in (2, 3, 5):
        names = tuple(f"c{each}" for each in range(classes))
        for truth, found in labels_of(classes):
            positives = [len(names) - 1, 0] if name == "f1" else [0]
            for positive in positives:
                wanted = names[positive] if name == "f1" else ""
                task = task_of("classification", name, names, wanted)
                ours = value_of_classes(task, truth, found)
                compare(ours, reference(name, classes, positive, truth, found))


def reference(name: str, classes: int, positive: int, truth: Labels, found: Labels) -> float:
    """Return a metric by scikit-learn's definition."""
    with warnings.catch_warnings():
        # Of a single class.
        warnings.simplefilter("ignore")
        if name == "accuracy":
            return float(sklearn.accuracy_score(truth, found))
        if name == "matthews":
            return float(sklearn.matthews_corrcoef(truth, found))
        every = {"labels": range(classes), "average": "macro", "zero_division": 0}
        if name == "macro_f1":
            return float(sklearn.f1_score(truth, found, **every))
        sides = [[label == positive for label in side] for side in (truth, found)]
        return float(sklearn.f1_score(*sides, zero_division=0))


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_correlations(
    name: str, compare: Callable[[float, float], None], request: pytest.FixtureRequest
) -> None:
    """Where a side is constant, the correlation is 0 to us and undefined to scipy."""
    request.node.stash[ROW] = (
        "scipy", version("scipy"), f"{name}, random and edge inputs, with ties"
    )  # fmt: skip
    theirs = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name]
    random = np.random.default_rng(0)
    for size, scale in itertools.product((2, 3, 5, 20, 300), (1.0, 1e-8, 1e6)):
        for ties, offset in itertools.product((False, True), (0.0, 3.0, -50.0)):
            truth, noise = random.normal(size=(2, size))
            if ties:
                truth, noise = truth.round(), noise.round()
            for found in (truth, -truth, noise, truth + noise, truth**3, np.zeros(size)):
                sides = truth * scale + offset * scale, found * scale
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    expected = float(theirs(*sides).statistic)
                examples = [Example(id="", label=float(each)) for each in sides[0]]
                predictions = [Prediction(id="", value=float(each)) for each in sides[1]]
                ours = value_of(task_of("regression", name, (), ""), examples, predictions)
                compare(ours, 0.0 if math.isnan(expected) else expected)


def conlleval(
    truth: Sequence[Sequence[str]], found: Sequence[Sequence[str]]
) -> tuple[float, float, float]:
    """Return precision, recall and F1 as the script of CoNLL-2000 counts chunks.

    Restated from its description: chunks begin and end by the tags of two neighbouring words, in
    the schemes IOB1 and IOB2; a chunk is right if begin, end and type are.
    """

    def ends(before: tuple[str, str], after: tuple[str, str]) -> bool:
        changes = before[1] != after[1]
        return before[0] != "O" and (after[0] in "BO" or changes)

    def begins(before: tuple[str, str], after: tuple[str, str]) -> bool:
        changes = before[1] != after[1]
        return after[0] == "B" or (after[0] == "I" and (before[0] == "O" or changes))

    def split(tag: str) -> tuple[str, str]:
        position, _, kind = tag.partition("-")
        return position, kind

    right = labelled = predicted = 0
    is_open = False
    outside = ("O", "")
    before = [outside, outside]
    words = [
        pair
        for sides in zip(truth, found, strict=True)
        for pair in [*zip(*sides, strict=True), ("O", "O")]
    ]
    for pair in words:
        after = [split(tag) for tag in pair]
        ending = [ends(*each) for each in zip(before, after, strict=True)]
        beginning = [begins(*each) for each in zip(before, after, strict=True)]
        if is_open:
            if all(ending) and before[0][1] == before[1][1]:
                right, is_open = right + 1, False
            elif ending[0] != ending[1] or after[0][1] != after[1][1]:
                is_open = False
        if all(beginning) and after[0][1] == after[1][1]:
            is_open = True
        labelled, predicted = labelled + beginning[0], predicted + beginning[1]
        before = after
    precision = right / predicted if predicted else 0.0
    recall = right / labelled if labelled else 0.0
    return precision, recall, 2 * right / (labelled + predicted) if labelled + predicted else 0.0


TAGS = ["O", "B-X", "I-X", "B-Y", "I-Y"]


def tags_of() -> Iterator[tuple[list[list[str]], list[list[str]]]]:
    """Yield sentences with every pair of tags at every place, mostly not well formed."""
    pairs = [list(pair) for pair in itertools.product(TAGS, repeat=2)]
    for truth, found in itertools.product(pairs, repeat=2):
        yield [truth], [found]
    random = np.random.default_rng(1)
    for keep in (0.0, 0.5, 0.8, 1.0):
        for _ in range(15):
            sizes = random.integers(1, 12, size=random.integers(1, 20))
            truth = [random.choice(TAGS, size).tolist() for size in sizes]
            yield (
                truth,
                [
                    [t if random.random() < keep else str(random.choice(TAGS)) for t in s]
                    for s in truth
                ],
            )
    yield [["O"] * 4], [["O"] * 4]
    yield [["O"] * 4], [["B-X", "I-X", "O", "O"]]


def entity_scores(
    judge: str, truth: Sequence[Sequence[str]], found: Sequence[Sequence[str]]
) -> tuple[float, float, float]:
    """Return precision, recall and F1 of entities; of words by scikit-learn."""
    if judge == "conlleval":
        return conlleval(truth, found)
    options: dict[str, Any] = {"average": "micro", "zero_division": 0}
    if judge == "seqeval":
        scores = seqeval.precision_recall_fscore_support(truth, found, **options)
    else:
        sides = [[tag for tags in side for tag in tags] for side in (truth, found)]
        scores = sklearn.precision_recall_fscore_support(*sides, labels=TAGS[1:], **options)
    precision, recall, f1, _ = scores
    return float(precision), float(recall), float(f1)


@pytest.mark.parametrize("judge", ["conlleval", "seqeval", "scikit-learn"])
def test_metrics_of_tags(
    judge: str, compare: Callable[[float, float], None], request: pytest.FixtureRequest
) -> None:
    """Tags that are not well formed, too: an entity may begin with I, as in IOB1."""
    kind, prefix = ("words", "token_") if judge == "scikit-learn" else ("entities", "")
    request.node.stash[ROW] = (
        *(("conlleval (restated)", "") if judge == "conlleval" else (judge, version(judge))),
        f"precision, recall and F1 of {kind}, every pair of tags of two types, and random ones",
    )  # fmt: skip
    names = [f"{prefix}{each}" for each in ("precision", "recall", "f1")]
    tasks = [task_of("tokens", name, tuple(TAGS), "") for name in names]
    for truth, found in tags_of():
        examples = [
            Example(id="", words=("w",) * len(tags), tags=tuple(map(TAGS.index, tags)))
            for tags in truth
        ]
        predictions = [Prediction(id="", value=tuple(tags)) for tags in found]
        for task, value in zip(tasks, entity_scores(judge, truth, found), strict=True):
            compare(value_of(task, examples, predictions), value)

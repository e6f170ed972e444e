"""Microsoft's metrics of GLUE, SuperGLUE and NER beside ours, on random and on edge predictions."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.judges.shims import load, microsoft_package
from megatron_deberta.tasks import load_task
from megatron_deberta.tasks.examples import Example, Prediction
from megatron_deberta.tasks.metrics import CorrelationMetric, paired_metric
from tests.support.judges import package_folder, record, version

# scikit-learn, SciPy and seqeval warn of metrics that are not defined.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::RuntimeWarning", "ignore:.*constant"
    ),
]
PACKAGE = "DeBERTa"
SEED = 7
RANDOM_CASES = 40
LIMIT = 1e-12
Integers = npt.NDArray[np.int64]

TASKS: dict[str, tuple[str, dict[str, str]]] = {
    "mrpc": ("MRPCTask", {"accuracy": "accuracy", "f1": "f1"}),
    "qqp": ("QQPTask", {"accuracy": "accuracy", "f1": "f1"}),
    "cola": ("ColaTask", {"matthews": "mcc", "accuracy": "accuracy"}),
    "sst2": ("SST2Task", {"accuracy": "accuracy"}),
    "rte": ("RTETask", {"accuracy": "accuracy"}),
    "qnli": ("QNLITask", {"accuracy": "accuracy"}),
}
"""Our task, Microsoft's, and our metrics by the names of both."""


@pytest.fixture(scope="module", autouse=True)
def release() -> Iterator[str]:
    folder = package_folder(f"{PACKAGE}==0.1.12")
    with microsoft_package(folder):
        yield version(folder, PACKAGE)


def cases(num_classes: int) -> Iterator[tuple[Integers, Integers]]:
    """Yield right and predicted classes: edges first, then random ones of unequal frequencies."""
    every = np.arange(12) % num_classes
    yield every, every
    yield every, (every + 1) % num_classes
    for constant in range(num_classes):
        yield every, np.full(12, constant)
        yield np.full(12, constant), every
        yield np.full(5, constant), np.full(5, constant)
        yield np.array([constant]), np.array([0])
    random = np.random.default_rng(SEED)
    for _ in range(RANDOM_CASES):
        size = int(random.integers(1, 200))
        shares = random.dirichlet(np.full(num_classes, 0.7))
        yield random.choice(num_classes, size, p=shares), random.integers(0, num_classes, size)


task_of = functools.cache(load_task)


def ours(task: str, truth: Integers, found: Integers, names: Mapping[str, str]) -> dict[str, float]:
    config = task_of(task)
    examples = [Example(id=str(i), label=int(label)) for i, label in enumerate(truth)]
    predictions = [
        Prediction(id=str(i), index=int(index), value=str(index)) for i, index in enumerate(found)
    ]
    return {
        name: paired_metric(config, name, examples, predictions, has_best_text=False).value()
        for name in names
    }


def logits_of(found: Integers, num_classes: int) -> Any:
    """Return logits whose largest value is that of the predicted class, ties aside."""
    noise = np.random.default_rng(SEED).random((len(found), num_classes))
    return noise + 2 * np.eye(num_classes)[found]


def test_classes(release: str) -> None:
    tasks, worst, number = load("apps.tasks.glue_tasks"), 0.0, 0
    for name, (class_name, names) in TASKS.items():
        metrics = getattr(tasks, class_name).get_metrics_fn(None)
        for truth, found in cases(2):
            theirs = metrics(logits_of(found, 2), truth)
            values = ours(name, truth, found, names)
            for metric, their_name in names.items():
                assert values[metric] == pytest.approx(theirs[their_name], abs=LIMIT), name
                worst = max(worst, abs(values[metric] - theirs[their_name]))
            number += 1
    macro_f1 = load("apps.tasks.metrics").metric_macro_f1
    for truth, found in cases(3):
        expected = macro_f1(logits_of(found, 3), truth, [0, 1, 2])
        value = ours("cb", truth, found, {"macro_f1": ""})["macro_f1"]
        assert value == pytest.approx(expected, abs=LIMIT)
        worst, number = max(worst, abs(value - expected)), number + 1
    record(
        "Microsoft DeBERTa (package)", release,
        "metrics of GLUE and SuperGLUE: accuracy, F1, macro F1, Matthews' correlation",
        f"{worst:.0e}", f"{LIMIT:.0e}", number,
    )  # fmt: skip


def test_choices(release: str) -> None:
    """COPA: Microsoft's metric reads two rows per question, each with the logits of 0 and 1."""
    metric, random = load("apps.tasks.metrics").metric_multi_accuracy, np.random.default_rng(SEED)
    for _ in range(RANDOM_CASES):
        size = int(random.integers(1, 60))
        truth, scores = random.integers(0, 2, size), random.normal(size=(size, 2))
        logits = np.stack([np.zeros(2 * size), scores.flatten()], axis=1)
        expected = metric(logits, np.eye(2)[truth].flatten(), 2)
        value = ours("copa", truth, scores.argmax(axis=1), {"accuracy": ""})["accuracy"]
        assert value == pytest.approx(expected, abs=LIMIT)
    record(
        "Microsoft DeBERTa (package)", release, "metric of COPA: accuracy of choices",
        f"below {LIMIT:.0e}", f"{LIMIT:.0e}", RANDOM_CASES,
    )  # fmt: skip


def test_correlations(release: str) -> None:
    metrics = load("apps.tasks.glue_tasks").STSBTask.get_metrics_fn(None)
    random, worst = np.random.default_rng(SEED), 0.0
    for number in range(RANDOM_CASES):
        size = int(random.integers(3, 300))
        truth, found = random.uniform(0, 5, size), random.normal(2, 3, size)
        if number % 2:
            # Ties, as in STS-B's own scores
            truth, found = truth.round(), found.round()
        truth[:2] = 0, 5
        theirs = metrics(found, truth)
        for name, their_name in (("pearson", "pearsonr"), ("spearman", "spearmanr")):
            value = CorrelationMetric(name, truth, found).value()
            assert value == pytest.approx(theirs[their_name], abs=LIMIT)
            worst = max(worst, abs(value - theirs[their_name]))
    # The one difference: SciPy has no correlation with a constant.
    constant = np.full(4, 2.0), np.arange(4.0)
    assert all(math.isnan(value) for value in metrics(*constant).values())
    assert CorrelationMetric("pearson", *constant).value() == 0
    record(
        "Microsoft DeBERTa (package)", release, "metrics of STS-B: Pearson and Spearman, with ties",
        f"{worst:.0e}; constant scores: 0 here, NaN there", f"{LIMIT:.0e}", RANDOM_CASES,
    )  # fmt: skip


def test_entities(release: str) -> None:
    """NER: random tags, also sequences that no annotator writes, such as I- after another type."""
    their_task = load("apps.tasks.ner_task").NERTask
    metrics = their_task.get_metrics_fn(their_task.__new__(their_task))
    labels = their_task.get_labels(None)
    task, random, worst = task_of("conll2003"), np.random.default_rng(SEED), 0.0
    assert sorted(task.labels) == sorted(labels)
    for number in range(RANDOM_CASES):
        lengths = random.integers(1, 30, int(random.integers(1, 12)))
        truth = [random.integers(0, 9, size) for size in lengths]
        found = [
            np.where(random.random(len(tags)) < random.random(), tags, random.integers(0, 9))
            for tags in truth
        ]
        if number == 0:
            found = truth
        if number == 1:
            # No entity on either side
            truth = found = [np.zeros(5, np.int64)]
        theirs = metrics(*their_arrays(truth, found, random))
        examples = [
            Example(id=str(i), words=("w",) * len(tags),
                    tags=tuple(task.labels.index(labels[tag]) for tag in tags))
            for i, tags in enumerate(truth)
        ]  # fmt: skip
        predictions = [
            Prediction(id=str(i), value=tuple(labels[tag] for tag in tags))
            for i, tags in enumerate(found)
        ]
        for name in ("accuracy", "f1", "precision", "recall"):
            value = paired_metric(task, name, examples, predictions, has_best_text=False).value()
            assert value == pytest.approx(theirs[name], abs=LIMIT), name
            worst = max(worst, abs(value - theirs[name]))
    record(
        "Microsoft DeBERTa (package)", release, "metrics of NER: accuracy, F1, precision, recall",
        f"{worst:.0e}", f"{LIMIT:.0e}", RANDOM_CASES,
    )  # fmt: skip


def their_arrays(
    truth: list[Integers], found: list[Integers], random: np.random.Generator
) -> tuple[Any, Any]:
    """Return logits ``[B, N, 9]`` and labels ``[B, N]``, with pieces that have no label (-1)."""
    longest = max(map(len, truth))
    labels = np.full((len(truth), 2 * longest), -1)
    logits = random.random((*labels.shape, 9))
    for row, (tags, predicted) in enumerate(zip(truth, found, strict=True)):
        # Every other piece continues a word.
        labels[row, : 2 * len(tags) : 2] = tags
        logits[row, np.arange(0, 2 * len(tags), 2), predicted] += 2
    return logits, labels

"""Metrics by scikit-learn, SciPy and seqeval."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.tasks.task import OUTSIDE, TOKEN_PREFIX, TaskConfig, entities

Classes = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]
_MOST_GROUPS = 20
"""Groups up to which the accuracy of each is reported (RACE has middle and high)."""


def class_metrics(
    task: TaskConfig, truth: Classes, found: Classes, groups: Sequence[str]
) -> dict[str, float]:
    """Return the metrics of classes or choices.

    Args:
        task: names the metrics and the positive label of F1.
        truth: right class per example.
        found: predicted class per example.
        groups: group per example; empty strings if there are none.
    """
    from sklearn import metrics

    labels = task.labels
    positive = labels.index(task.positive_label) if task.positive_label else len(labels) - 1

    def f1() -> Any:
        # Of one class against the others, so that tasks may have more than two.
        return metrics.f1_score(truth == positive, found == positive, zero_division=0)

    compute: Mapping[str, Callable[[], Any]] = {
        "accuracy": lambda: metrics.accuracy_score(truth, found),
        "f1": f1,
        "f1a": f1,
        "macro_f1": lambda: metrics.f1_score(
            truth, found, labels=range(len(labels)), average="macro", zero_division=0
        ),
        "matthews": lambda: metrics.matthews_corrcoef(truth, found),
        "group_exact": lambda: _group_mean(groups, truth == found),
        "gender_parity": lambda: _share_of_equal_pairs(groups, found),
    }
    result: dict[str, float] = {name: float(compute[name]()) for name in task.metrics}
    if task.head == "choices" and 2 <= len(set(groups)) <= _MOST_GROUPS:
        for group in sorted(set(groups)):
            members = np.array([name == group for name in groups])
            result[f"accuracy_{group}"] = float(np.mean(truth[members] == found[members]))
    return result


def _group_mean(groups: Sequence[str], right: npt.NDArray[np.bool_]) -> float:
    """Return the share of groups whose members are all right (MultiRC's exact match)."""
    whole: dict[str, bool] = {}
    for group, is_right in zip(groups, right.tolist(), strict=True):
        whole[group] = whole.get(group, True) and is_right
    return float(np.mean(list(whole.values())))


def _share_of_equal_pairs(groups: Sequence[str], found: Classes) -> float:
    """Return the share of groups with a single prediction (Winogender's gender parity)."""
    classes: dict[str, set[int]] = defaultdict(set)
    for group, index in zip(groups, found.tolist(), strict=True):
        classes[group].add(index)
    return float(np.mean([len(members) == 1 for members in classes.values()]))


def regression_metrics(names: Sequence[str], truth: Scores, found: Scores) -> dict[str, float]:
    """Return correlations; 0 where one side is constant, so that they are undefined.

    Args:
        names: of the metrics wanted.
        truth: labels.
        found: predicted scores.
    """
    from scipy import stats

    is_constant = len(truth) < 2 or np.ptp(truth) == 0 or np.ptp(found) == 0
    pearson = 0.0 if is_constant else float(stats.pearsonr(truth, found).statistic)
    spearman = 0.0 if is_constant else float(stats.spearmanr(truth, found).statistic)
    values = {
        "pearson": pearson,
        "spearman": spearman,
        "pearson_spearman": (pearson + spearman) / 2,
    }
    return {name: values[name] for name in names}


def tag_metrics(
    task: TaskConfig, truth: Sequence[list[str]], found: Sequence[list[str]]
) -> dict[str, float]:
    """Return metrics of entities as conlleval counts them, of words, and the accuracy of words.

    Args:
        task: names the metrics; its labels have a scheme if a metric is of entities.
        truth: right labels of the words of each sentence.
        found: predicted labels.
    """
    values: dict[str, float] = {}
    for name in task.metrics:
        counts = tag_counts(task, name, truth, found)
        values[name] = float(finish_tag_metric(name, np.array([counts], np.float64))[0])
    return values


def tag_counts(
    task: TaskConfig, name: str, truth: Sequence[Sequence[str]], found: Sequence[Sequence[str]]
) -> tuple[int, int, int]:
    """Count the entities or words of which a metric is computed.

    Metrics of words (``token_f1``) do not count words that are O, as micro-averages do.

    Args:
        task: the task.
        name: of the metric.
        truth: tags of the words of each sentence.
        found: predicted tags, of the same lengths.

    Returns:
        Numbers of right, labelled and predicted entities, or words.
    """
    if name == "accuracy" or name.startswith(TOKEN_PREFIX):
        outside = None if name == "accuracy" else OUTSIDE
        pairs = [
            (a, b) for x, y in zip(truth, found, strict=True) for a, b in zip(x, y, strict=True)
        ]
        right = sum(a == b != outside for a, b in pairs)
        return right, sum(a != outside for a, _ in pairs), sum(b != outside for _, b in pairs)
    sets = entities(task.labels, truth), entities(task.labels, found)
    return len(sets[0] & sets[1]), len(sets[0]), len(sets[1])


def finish_tag_metric(name: str, sums: Scores) -> Scores:
    """Return a metric from rows of summed `tag_counts`; 0 where none is defined."""
    right, labelled, predicted = sums.T
    of = {
        "accuracy": (right, labelled),
        "recall": (right, labelled),
        "precision": (right, predicted),
        "f1": (2 * right, labelled + predicted),
    }
    numerator, denominator = of[name.removeprefix(TOKEN_PREFIX)]
    result: Scores = np.zeros(len(sums))
    np.divide(numerator, denominator, out=result, where=denominator != 0)
    return result

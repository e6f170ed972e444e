"""The metrics of ``tasks`` as functions of resampled examples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from megatron_deberta.finetune.compare.paired import Floats, PairedMetric
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.metrics import finish_tag_metric, tag_counts
from megatron_deberta.tasks.scoring import Prediction, sentences
from megatron_deberta.tasks.spans import best_threshold, exact_match, right_answers, token_f1
from megatron_deberta.tasks.task import TaskConfig

Finish = Callable[[Floats], Floats]


@dataclass(frozen=True, slots=True)
class CountMetric:
    """Metric that is a function of sums over units.

    Attributes:
        counts: addends of each unit, float64 ``[n, K]``.
        finish: returns the metric ``[C]`` of sums ``[C, K]``.
    """

    counts: Floats
    finish: Finish

    @property
    def num_units(self) -> int:
        """Number of units."""
        return len(self.counts)

    def value(self) -> float:
        """Return the metric of all units."""
        return float(self.finish(self.counts.sum(axis=0, keepdims=True))[0])

    def resampled(self, weights: Floats) -> Floats:
        """Return the metric per resample; see ``PairedMetric``."""
        return self.finish(weights @ self.counts)

    def swapped(self, other: CountMetric, mask: npt.NDArray[np.bool_]) -> Floats:
        """Return the metric with some predictions replaced; see ``PairedMetric``."""
        changes = mask.astype(np.float64) @ (other.counts - self.counts)
        return self.finish(self.counts.sum(axis=0) + changes)


@dataclass(frozen=True, slots=True)
class CorrelationMetric:
    """Correlation of predicted and right scores; 0 where one side is constant.

    Attributes:
        name: ``pearson``, ``spearman``, or their mean ``pearson_spearman``.
        truth: right score per example, float64 ``[n]``.
        found: predicted score per example, float64 ``[n]``.
    """

    name: str
    truth: Floats
    found: Floats

    @property
    def num_units(self) -> int:
        """Number of examples."""
        return len(self.truth)

    def value(self) -> float:
        """Return the correlation of all examples."""
        return float(self.resampled(np.ones((1, len(self.truth))))[0])

    def resampled(self, weights: Floats) -> Floats:
        """Return the correlation per resample; see ``PairedMetric``."""
        values = []
        if self.name != "spearman":
            values.append(_correlation(self.truth[None], self.found[None], weights))
        if self.name != "pearson":
            truth, found = (_weighted_ranks(v, weights) for v in (self.truth, self.found))
            values.append(_correlation(truth, found, weights))
        mean: Floats = np.mean(values, axis=0)
        return mean

    def swapped(self, other: CorrelationMetric, mask: npt.NDArray[np.bool_]) -> Floats:
        """Return the correlation with some predictions replaced; see ``PairedMetric``."""
        from scipy import stats

        found, ones = np.where(mask, other.found, self.found), np.ones(mask.shape)
        values = []
        if self.name != "spearman":
            values.append(_correlation(self.truth[None], found, ones))
        if self.name != "pearson":
            truth, ranks = stats.rankdata(self.truth)[None], stats.rankdata(found, axis=1)
            values.append(_correlation(truth, ranks, ones))
        mean: Floats = np.mean(values, axis=0)
        return mean


def paired_metric(
    task: TaskConfig,
    name: str,
    examples: Sequence[Example],
    predictions: Sequence[Prediction],
    *,
    has_best_text: bool,
) -> PairedMetric:
    """Return a metric of predictions as a function of resampled examples.

    Args:
        task: the task.
        name: the metric.
        examples: labelled examples.
        predictions: their predictions, in the same order.
        has_best_text: spans: the values are the best answers even where ``null_score`` is above
            the threshold of no answer, which is then 0, or for ``best_f1`` and ``best_exact`` the
            best one on all examples (resamples keep it). False: no answer is in the values.
    """
    if task.head == "regression":
        scores = np.array([example.label for example in examples], np.float64)
        predicted = np.array([prediction.value for prediction in predictions], np.float64)
        return CorrelationMetric(name, scores, predicted)
    if task.head == "spans":
        return _mean_of(_span_scores(task, name, examples, predictions, has_best_text))
    if task.head == "tokens":
        return _tag_metric(task, name, examples, predictions)
    truth = np.array([example.label for example in examples], np.int64)
    found = np.array([prediction.index for prediction in predictions], np.int64)
    groups = [example.group for example in examples]
    if name in ("group_exact", "gender_parity"):
        return _mean_of(_group_scores(name, groups, truth, found))
    return _class_metric(task, name, truth, found)


def _mean_of(scores: Floats) -> CountMetric:
    """Return the mean of one score per unit."""
    counts = np.stack([scores, np.ones(len(scores))], axis=1)
    return CountMetric(counts, lambda sums: _ratio(sums[:, 0], sums[:, 1]))


def _class_metric(
    task: TaskConfig, name: str, truth: npt.NDArray[np.int64], found: npt.NDArray[np.int64]
) -> CountMetric:
    if name == "accuracy":
        return _mean_of((truth == found).astype(np.float64))
    size = len(task.labels)
    confusion = np.zeros((len(truth), size * size))
    confusion[np.arange(len(truth)), truth * size + found] = 1
    positive = task.labels.index(task.positive_label) if task.positive_label else size - 1
    finish: Mapping[str, Finish] = {
        "matthews": lambda sums: _matthews(sums.reshape(-1, size, size)),
        "macro_f1": lambda sums: _f1(sums.reshape(-1, size, size)).mean(axis=1),
        "f1": lambda sums: _f1(sums.reshape(-1, size, size))[:, positive],
        "f1a": lambda sums: _f1(sums.reshape(-1, size, size))[:, positive],
    }
    return CountMetric(confusion, finish[name])


def _f1(confusion: Floats) -> Floats:
    """Return the F1 of each class ``[C, K]`` from ``[C, K, K]`` (right class first)."""
    right = np.diagonal(confusion, axis1=1, axis2=2)
    return _ratio(2 * right, confusion.sum(axis=1) + confusion.sum(axis=2))


def _matthews(confusion: Floats) -> Floats:
    """Return Matthews' correlation (Gorodkin 2004 for several classes), 0 if not defined."""
    truth, found, total = (confusion.sum(axis=axis) for axis in (2, 1, (1, 2)))
    right = np.trace(confusion, axis1=1, axis2=2)
    covariance = right * total - (truth * found).sum(axis=1)
    spreads = [total**2 - (side**2).sum(axis=1) for side in (truth, found)]
    return _ratio(covariance, np.sqrt(spreads[0] * spreads[1]))


def _group_scores(
    name: str,
    groups: Sequence[str],
    truth: npt.NDArray[np.int64],
    found: npt.NDArray[np.int64],
) -> Floats:
    """Return a score per group, in the order of the groups' first examples."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    if name == "group_exact":
        return np.array([float((truth[m] == found[m]).all()) for m in members.values()])
    return np.array([float(len(set(found[m].tolist())) == 1) for m in members.values()])


def _span_scores(
    task: TaskConfig,
    name: str,
    examples: Sequence[Example],
    predictions: Sequence[Prediction],
    has_best_text: bool,
) -> Floats:
    """Return exact match or F1 per question."""
    compare = token_f1 if name.endswith("f1") else exact_match
    truth = [right_answers(task, example) for example in examples]
    texts = [str(prediction.value) for prediction in predictions]
    empty = np.array([float(not answers) for answers in truth])
    scores = np.array(
        [
            max((compare(text, answer) for answer in answers), default=0.0)
            for text, answers in zip(texts, truth, strict=True)
        ]
    )
    if not task.unanswerable:
        return scores
    if not has_best_text:
        return np.where([not text for text in texts], empty, scores)
    nulls = np.array([prediction.null_score for prediction in predictions])
    threshold = best_threshold(nulls, scores, empty)[1] if name.startswith("best") else 0.0
    return np.where(nulls > threshold, empty, scores)


def _tag_metric(
    task: TaskConfig, name: str, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> CountMetric:
    """Return a metric of entities, as conlleval counts them, or of words."""
    counts = []
    for example, prediction in zip(examples, predictions, strict=True):
        assert isinstance(prediction.value, tuple)
        tags = tuple(task.labels[tag] for tag in example.tags)
        truth, found = (sentences(example, side) for side in (tags, prediction.value))
        counts.append(tag_counts(task, name, truth, found))
    return CountMetric(np.array(counts, np.float64), partial(finish_tag_metric, name))


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Divide, with 0 where the denominator is 0."""
    zero = np.zeros(np.broadcast_shapes(numerator.shape, denominator.shape))
    return np.divide(numerator, denominator, out=zero, where=denominator != 0)


def _correlation(x: Floats, y: Floats, weights: Floats) -> Floats:
    """Return Pearson's correlation of rows ``[C, n]`` (or ``[1, n]``), weighted."""
    total = weights.sum(axis=1, keepdims=True)
    x, y = (v - (weights * v).sum(axis=1, keepdims=True) / total for v in (x, y))
    covariance = (weights * x * y).sum(axis=1)
    spreads = [(weights * v * v).sum(axis=1) for v in (x, y)]
    # Below this, rounding errors of constant values.
    product = np.sqrt(spreads[0] * spreads[1])
    return _ratio(covariance, np.where(product > 1e-12, product, 0.0))


def _weighted_ranks(values: Floats, weights: Floats) -> Floats:
    """Return the mean ranks ``[C, n]`` of values that occur ``weights`` times each."""
    distinct, inverse = np.unique(values, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(len(distinct)))
    sizes = np.add.reduceat(weights[:, order], starts, axis=1)
    ranks = np.cumsum(sizes, axis=1) - (sizes - 1) / 2
    found: Floats = ranks[:, inverse]
    return found

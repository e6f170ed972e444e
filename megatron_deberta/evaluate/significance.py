"""Significance tests: paired over examples, and Welch's t-test over seeds.

Sources: paired bootstrap: Efron and Tibshirani (1993), chapters 13 and 16, as in Koehn (2004);
approximate randomisation: Noreen (1989), chapter 2, as in Yeh (2000); t-test: Welch (1947).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.metrics import finish_tag_metric, tag_counts
from megatron_deberta.tasks.scoring import Prediction, sentences
from megatron_deberta.tasks.spans import best_threshold, exact_match, right_answers, token_f1
from megatron_deberta.tasks.task import TaskConfig

Floats = npt.NDArray[np.float64]


_CHUNK = 256
"""Resamples that are computed together."""


_EQUAL = 1e-12
"""Differences that are closer are equal."""


class PairedMetric(Protocol):
    """Metric of one run as a function of its units: examples, or groups of them."""

    @property
    def num_units(self) -> int:
        """Number of units, n."""

    def value(self) -> float:
        """Return the metric of all units."""

    def resampled(self, weights: Floats) -> Floats:
        """Return the metric per resample, float64 ``[C]``.

        Args:
            weights: how often each unit occurs, float64 ``[C, n]``.
        """

    def swapped(self, other: Self, mask: npt.NDArray[np.bool_]) -> Floats:
        """Return the metric after replacing some predictions by another run's, float64 ``[C]``.

        Args:
            other: another run on the same units.
            mask: units whose prediction is the other's, bool ``[C, n]``.
        """


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

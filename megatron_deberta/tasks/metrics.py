"""Metrics of predictions, also of resampled examples.

Sources: the evaluation scripts of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016 and 2018) and of ReCoRD
(Zhang et al. 2018), which normalise answers alike; conlleval (Tjong Kim Sang and De Meulder 2003).
"""

from __future__ import annotations

import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import comb
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from megatron_deberta.tasks.examples import Example, Prediction, sentences
from megatron_deberta.tasks.task import OUTSIDE, SCORE_HEADS, TOKEN_PREFIX, TaskConfig, entities

Floats = npt.NDArray[np.float64]


Finish = Callable[[Floats], Floats]


_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)


_INVISIBLE = "\u200b\u2060\ufeff"
"""Characters without width that no word contains: tokenizers remove them or read them as spaces."""


_REMOVED = str.maketrans("", "", string.punctuation + _INVISIBLE)


_MOST_GROUPS = 20
"""Groups up to which the accuracy of each is reported (RACE has middle and high)."""


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
        return self._correlations(
            self.found[None], weights, lambda scores: _weighted_ranks(scores[0], weights)
        )

    def swapped(self, other: CorrelationMetric, mask: npt.NDArray[np.bool_]) -> Floats:
        """Return the correlation with some predictions replaced; see ``PairedMetric``."""
        from scipy import stats

        found = np.where(mask, other.found, self.found)
        return self._correlations(found, np.ones(mask.shape), partial(stats.rankdata, axis=1))

    def _correlations(
        self, found: Floats, weights: Floats, ranks: Callable[[Floats], Floats]
    ) -> Floats:
        """Return the correlation per row of ``found`` or ``weights``, of scores or of ranks."""
        truth, values = self.truth[None], []
        if self.name != "spearman":
            values.append(_correlation(truth, found, weights))
        if self.name != "pearson":
            values.append(_correlation(ranks(truth), ranks(found), weights))
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
    if task.head in SCORE_HEADS:
        scores = np.array([example.label for example in examples], np.float64)
        predicted = np.array([prediction.value for prediction in predictions], np.float64)
        return CorrelationMetric(name, scores, predicted)
    if task.head == "spans":
        return _mean_of(_span_scores(task, name, examples, predictions, has_best_text))
    if task.head == "tokens":
        return _tag_metric(task, name, examples, predictions)
    if task.head == "rerank":
        relevance = [example.relevance for example in examples]
        values = [prediction.probabilities for prediction in predictions]
        return CountMetric(ranking_counts(name, relevance, values), _mean)
    if task.head == "multilabel" or name not in ("accuracy", "group_exact", "gender_parity"):
        return _class_metric(task, name, *class_flags(task, examples, predictions))
    truth = np.array([example.label for example in examples], np.int64)
    found = np.array([prediction.index for prediction in predictions], np.int64)
    if name == "accuracy":
        return _mean_of(truth == found)
    # Groups are in the order of their first examples.
    members: dict[str, list[int]] = defaultdict(list)
    for index, example in enumerate(examples):
        members[example.group].append(index)
    agree = []
    for group in members.values():
        # All are right, or all are predicted alike.
        expected = truth[group] if name == "group_exact" else found[group[0]]
        agree.append((found[group] == expected).all())
    return _mean_of(agree)


def _mean_of(scores: npt.ArrayLike) -> CountMetric:
    """Return the mean of one score per unit."""
    addends = np.asarray(scores, np.float64)
    return CountMetric(np.stack([addends, np.ones(len(addends))], axis=1), _mean)


def _mean(sums: Floats) -> Floats:
    """Return the quotient of the two columns of sums ``[C, 2]``."""
    return _ratio(sums[:, 0], sums[:, 1])


def class_flags(
    task: TaskConfig, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which classes the examples have, and which are predicted, ``[examples, classes]``.

    Args:
        task: of the heads ``classification`` or ``multilabel``.
        examples: labelled examples.
        predictions: their predictions, in the same order.
    """
    if task.head != "multilabel":
        classes = np.arange(len(task.labels))
        labels = np.array([example.label for example in examples], np.int64)
        indices = np.array([prediction.index for prediction in predictions], np.int64)
        return labels[:, None] == classes, indices[:, None] == classes
    numbers = {label: number for number, label in enumerate(task.labels)}
    truth = np.array([example.tags for example in examples], np.bool_)
    found = np.zeros_like(truth)
    for row, prediction in zip(found, predictions, strict=True):
        assert isinstance(prediction.value, tuple)
        row[[numbers[label] for label in prediction.value]] = True
    return truth, found


def _class_metric(
    task: TaskConfig, name: str, truth: npt.NDArray[np.bool_], found: npt.NDArray[np.bool_]
) -> CountMetric:
    """Return a metric of classes or labels; accuracy counts examples with all labels right."""
    if name == "accuracy":
        return _mean_of((truth == found).all(axis=1))
    # Of macro_f1 and matthews all classes, of f1 the positive one against the others.
    if name in ("f1", "f1a"):
        positive = task.labels.index(task.positive_label) if task.positive_label else -1
        truth, found = truth[:, [positive]], found[:, [positive]]
    counts = np.stack([truth & found, truth, found], axis=1).astype(np.float64)
    if name.startswith("micro_"):
        finish = partial(finish_tag_metric, name.removeprefix("micro_"))
        return CountMetric(counts.sum(axis=2), finish)
    return CountMetric(
        counts.reshape(len(counts), -1), _matthews if name == "matthews" else _mean_f1
    )


def _mean_f1(sums: Floats) -> Floats:
    """Return the mean F1 ``[C]`` of classes whose right, labelled and predicted examples are given.

    Args:
        sums: ``[C, 3 K]``.
    """
    right, truth, found = np.split(sums, 3, axis=1)
    mean: Floats = _ratio(2 * right, truth + found).mean(axis=1)
    return mean


def _matthews(sums: Floats) -> Floats:
    """Return Matthews' correlation (Gorodkin 2004 for several classes), 0 if not defined.

    Args:
        sums: as of `_mean_f1`.
    """
    right, truth, found = np.split(sums, 3, axis=1)
    total = truth.sum(axis=1)
    covariance = right.sum(axis=1) * total - (truth * found).sum(axis=1)
    spreads = [total**2 - (side**2).sum(axis=1) for side in (truth, found)]
    return _ratio(covariance, np.sqrt(spreads[0] * spreads[1]))


def _span_scores(
    task: TaskConfig,
    name: str,
    examples: Sequence[Example],
    predictions: Sequence[Prediction],
    has_best_text: bool,
) -> Floats:
    """Return exact match or F1 per question."""
    scores, empty = _answer_scores(task, name, examples, predictions)
    if not task.unanswerable:
        return scores
    if not has_best_text:
        return np.where([not prediction.value for prediction in predictions], empty, scores)
    nulls = np.array([prediction.null_score for prediction in predictions])
    threshold = best_threshold(nulls, scores, empty)[1] if name.startswith("best") else 0.0
    return np.where(nulls > threshold, empty, scores)


def _answer_scores(
    task: TaskConfig, name: str, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> tuple[Floats, Floats]:
    """Return each answer's best score over the right ones, and the score of no answer."""
    compare = token_f1 if name.endswith("f1") else exact_match
    truth = [right_answers(task, example) for example in examples]
    scores = [
        max((compare(str(prediction.value), answer) for answer in answers), default=0.0)
        for prediction, answers in zip(predictions, truth, strict=True)
    ]
    return np.array(scores), np.array([float(not answers) for answers in truth])


def best_null_threshold(
    task: TaskConfig, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> float:
    """Return the threshold of no answer with the best F1; see `best_threshold`.

    Args:
        task: of the head ``spans``.
        examples: the questions.
        predictions: the best answers, whatever their ``null_score`` is.
    """
    nulls = np.array([prediction.null_score for prediction in predictions])
    return best_threshold(nulls, *_answer_scores(task, "f1", examples, predictions))[1]


def group_accuracies(
    examples: Sequence[Example], predictions: Sequence[Prediction]
) -> dict[str, float]:
    """Return the accuracy of each group, unless there are many (RACE has middle and high).

    Args:
        examples: labelled with a class or a choice.
        predictions: one per example, in the same order.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    for example, prediction in zip(examples, predictions, strict=True):
        right[example.group].append(example.label == prediction.index)
    if not 2 <= len(right) <= _MOST_GROUPS:
        return {}
    return {f"accuracy_{group}": float(np.mean(right[group])) for group in sorted(right)}


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


def finish_tag_metric(name: str, sums: Floats) -> Floats:
    """Return a metric ``[C]`` from summed `tag_counts` ``[C, 3]``; 0 where none is defined."""
    right, labelled, predicted = sums.T
    of = {
        "accuracy": (right, labelled),
        "recall": (right, labelled),
        "precision": (right, predicted),
        "f1": (2 * right, labelled + predicted),
    }
    return _ratio(*of[name.removeprefix(TOKEN_PREFIX)])


def _correlation(x: Floats, y: Floats, weights: Floats) -> Floats:
    """Return Pearson's correlation of rows ``[C, n]`` (or ``[1, n]``), weighted."""
    total = weights.sum(axis=1, keepdims=True)
    # Variances below this are rounding errors of constant values.
    least = [1e-26 * total[:, 0] * np.square(v).max(axis=1) for v in (x, y)]
    x, y = (v - (weights * v).sum(axis=1, keepdims=True) / total for v in (x, y))
    covariance = (weights * x * y).sum(axis=1)
    spreads = [(weights * v * v).sum(axis=1) for v in (x, y)]
    deviations = [
        np.sqrt(np.where(spread > bound, spread, 0.0))
        for spread, bound in zip(spreads, least, strict=True)
    ]
    return _ratio(covariance, deviations[0] * deviations[1])


def _weighted_ranks(values: Floats, weights: Floats) -> Floats:
    """Return the mean ranks ``[C, n]`` of values that occur ``weights`` times each."""
    distinct, inverse = np.unique(values, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(len(distinct)))
    sizes = np.add.reduceat(weights[:, order], starts, axis=1)
    ranks = np.cumsum(sizes, axis=1) - (sizes - 1) / 2
    found: Floats = ranks[:, inverse]
    return found


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Divide, with 0 where the denominator is 0."""
    zero = np.zeros(np.broadcast_shapes(numerator.shape, denominator.shape))
    return np.divide(numerator, denominator, out=zero, where=denominator != 0)


def right_answers(task: TaskConfig, example: Example) -> list[str]:
    """Return the texts of right answers; SQuAD 2.0's script ignores those without words."""
    texts = [answer.text for answer in example.answers or ()]
    return [text for text in texts if not task.unanswerable or normalize_answer(text)]


# The metrics of a split compare the same answers.
@lru_cache(maxsize=1 << 16)
def normalize_answer(text: str) -> str:
    """Lower-case, and remove punctuation, articles and superfluous white space.

    Unlike SQuAD's script, also remove characters without width: pieces do not contain them, so no
    prediction has them at its ends.
    """
    lowered = text.lower().translate(_REMOVED)
    return " ".join(_ARTICLES.sub(" ", lowered).split())


def exact_match(found: str, truth: str) -> float:
    """Return 1 if two answers are equal after normalisation, else 0."""
    return float(normalize_answer(found) == normalize_answer(truth))


def token_f1(found: str, truth: str) -> float:
    """Return the F1 of the words that two answers share after normalisation."""
    found_words, truth_words = normalize_answer(found).split(), normalize_answer(truth).split()
    if not found_words or not truth_words:
        # Without words on one side, the answers agree only if both have none.
        return float(found_words == truth_words)
    shared = sum((Counter(found_words) & Counter(truth_words)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(found_words), shared / len(truth_words)
    return 2 * precision * recall / (precision + recall)


def best_threshold(
    null_scores: npt.NDArray[np.float64],
    scores: npt.NDArray[np.float64],
    empty_scores: npt.NDArray[np.float64],
) -> tuple[float, float]:
    """Return the best mean score over all thresholds of no answer, and that threshold.

    Args:
        null_scores: score of no answer minus that of the best answer, per question.
        scores: score of the best answer.
        empty_scores: score of no answer.

    Returns:
        The best mean, and the threshold: no answer is given where ``null_scores`` is above it.
    """
    order = np.argsort(null_scores, kind="stable")
    ordered = null_scores[order]
    gains = np.concatenate([[0.0], np.cumsum(scores[order] - empty_scores[order])])
    # Questions of equal scores are answered together or not at all.
    is_border = np.concatenate([[True], ordered[1:] > ordered[:-1], [True]])
    gains[~is_border] = -np.inf
    answered = int(gains.argmax())
    mean = (empty_scores.sum() + gains[answered]) / len(scores)
    if answered == 0:
        return float(mean), float(ordered[0] - 1.0)
    return float(mean), float(ordered[answered - 1])


_DEPTH = 10
"""Places of a ranking that ``ndcg_at_10`` and ``mrr_at_10`` count."""


def ranking_counts(
    name: str, relevance: Sequence[Sequence[float]], scores: Sequence[Sequence[float]]
) -> Floats:
    """Return a metric of each query, and 1 where it counts: float64 ``[queries, 2]``.

    The metrics are expected values over all orders of passages with equal scores (McSherry and
    Najork 2008, "Computing Information Retrieval Performance Measures Efficiently in the Presence
    of Tied Scores"), so that the order of the passages in a file does not matter. Queries without
    a relevant passage do not count, as in trec_eval.

    Args:
        name: ``ndcg_at_10`` (gain: the relevance, as in scikit-learn), ``mrr_at_10`` or ``map``,
            for which every relevance above 0 is relevant.
        relevance: of the passages of each query.
        scores: of the same passages.
    """
    counts = np.zeros((len(scores), 2))
    for query, (labels, found) in enumerate(zip(relevance, scores, strict=True)):
        gains = np.array(labels, np.float64)
        if gains.any():
            counts[query] = _RANKING_METRICS[name](gains, np.array(found, np.float64)), 1.0
    return counts


def ranks(scores: Sequence[float]) -> list[int]:
    """Return the rank of each passage, from 1; of equal scores, the first comes first."""
    order = np.argsort(-np.array(scores), kind="stable")
    found = np.empty(len(order), np.int64)
    found[order] = np.arange(1, len(order) + 1)
    return [int(rank) for rank in found]


def _ties(gains: Floats, scores: Floats) -> Iterator[tuple[int, Floats]]:
    """Yield the passages of each score, best first: the number of those before, and their gains."""
    order = np.argsort(-scores, kind="stable")
    starts = np.flatnonzero(np.diff(scores[order], prepend=np.inf))
    for start, part in zip(starts, np.split(gains[order], starts[1:]), strict=True):
        yield int(start), part


def _ndcg(gains: Floats, scores: Floats) -> float:
    discounts = 1 / np.log2(np.arange(2, len(gains) + 2))
    discounts[_DEPTH:] = 0
    ideal = np.sort(gains)[::-1] @ discounts
    found = sum(
        part.mean() * discounts[at : at + len(part)].sum() for at, part in _ties(gains, scores)
    )
    return float(found / ideal)


def _reciprocal_rank(gains: Floats, scores: Floats) -> float:
    for at, part in _ties(gains, scores):
        size, relevant = len(part), int((part > 0).sum())
        if relevant:
            # The first relevant one is number i of its score.
            return sum(
                comb(size - 1 - i, relevant - 1) / comb(size, relevant) / (at + 1 + i)
                for i in range(min(size, _DEPTH - at))
            )
    return 0.0


def _average_precision(gains: Floats, scores: Floats) -> float:
    total = before = 0.0
    for at, part in _ties(gains, scores):
        size, relevant = len(part), float((part > 0).sum())
        place = np.arange(size)
        others = (relevant - 1) / max(1, size - 1)
        total += float((relevant / size * (before + 1 + place * others) / (at + 1 + place)).sum())
        before += relevant
    return total / before


_RANKING_METRICS = {"ndcg_at_10": _ndcg, "mrr_at_10": _reciprocal_rank, "map": _average_precision}

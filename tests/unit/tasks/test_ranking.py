"""Metrics of ranked passages: scikit-learn's, and means over all orders of equal scores."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, ndcg_score

from megatron_deberta.tasks.metrics import ranking_counts, ranks

LIMIT = 1e-12


def lists(grades: int, size: int = 24) -> tuple[list[list[float]], list[list[float]]]:
    """Return random relevance and scores of 60 queries; some scores of a query are equal.

    Args:
        grades: relevance is an integer below it.
        size: queries have at least 2 and fewer than ``size`` passages.
    """
    random = np.random.default_rng(3)
    sizes = random.integers(2, size, 60).tolist()
    relevance = [random.integers(0, grades, n).tolist() for n in sizes]
    return relevance, [random.integers(0, 6, n).astype(float).tolist() for n in sizes]


def mean_over_orders(
    value: Callable[[Sequence[float]], float], relevance: Sequence[float], scores: Sequence[float]
) -> float:
    """Return the mean of a metric of ranked relevance over all orders that the scores allow."""
    found = [
        value([relevance[n] for n in order])
        for order in itertools.permutations(range(len(scores)))
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]
    return float(np.mean(found))


def reciprocal_rank(ranked: Sequence[float]) -> float:
    return next((1 / (n + 1) for n, each in enumerate(ranked[:10]) if each > 0), 0.0)


def average_precision(ranked: Sequence[float]) -> float:
    return float(average_precision_score(ranked, range(len(ranked), 0, -1)))


def test_ndcg_is_that_of_scikit_learn() -> None:
    relevance, scores = lists(4)
    counts = ranking_counts("ndcg_at_10", relevance, scores)
    expected = [
        ndcg_score([labels], [found], k=10) for labels, found in zip(relevance, scores, strict=True)
    ]
    np.testing.assert_allclose(counts[:, 0], expected, rtol=0, atol=LIMIT)
    assert counts[:, 1].tolist() == [float(any(labels)) for labels in relevance]


@pytest.mark.parametrize(
    ("name", "value"), [("mrr_at_10", reciprocal_rank), ("map", average_precision)]
)
def test_equal_scores_count_by_the_mean_of_their_orders(
    name: str, value: Callable[[Sequence[float]], float]
) -> None:
    relevance, scores = lists(2, 7)
    counts = ranking_counts(name, relevance, scores)
    for (found, is_counted), labels, given in zip(counts, relevance, scores, strict=True):
        assert is_counted == any(labels)
        if is_counted:
            assert found == pytest.approx(mean_over_orders(value, labels, given), abs=LIMIT)


def test_only_the_first_ten_places_count() -> None:
    falling = [float(-n) for n in range(30)]
    for place in (0, 9, 10, 25):
        labels = [float(n == place) for n in range(30)]
        ((found, _),) = ranking_counts("mrr_at_10", [labels], [falling])
        assert found == (1 / (place + 1) if place < 10 else 0)
    # Half of the orders of 20 equal scores have it among the first ten.
    ((found, _),) = ranking_counts("mrr_at_10", [[0] * 19 + [1]], [[0.0] * 20])
    assert found == pytest.approx(sum(1 / n for n in range(1, 11)) / 20, abs=LIMIT)


def test_ranks() -> None:
    assert ranks([0.5, 2.0, -1.0, 2.0]) == [3, 1, 4, 2]

"""Metrics of ranked passages, and ranks.

The metrics are expected values over all orders of passages with equal scores (McSherry and Najork
2008, "Computing Information Retrieval Performance Measures Efficiently in the Presence of Tied
Scores"), so that the order of the passages in a file does not matter. Queries without a relevant
passage do not count, as in trec_eval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import comb

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_DEPTH = 10


def ranking_counts(
    name: str, relevance: Sequence[Sequence[float]], scores: Sequence[Sequence[float]]
) -> Floats:
    """Return a metric of each query, and 1 where it counts: float64 ``[queries, 2]``.

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
            counts[query] = _METRICS[name](gains, np.array(found, np.float64)), 1.0
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


_METRICS: Mapping[str, Callable[[Floats, Floats], float]] = {
    "ndcg_at_10": _ndcg,
    "mrr_at_10": _reciprocal_rank,
    "map": _average_precision,
}

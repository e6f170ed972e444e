"""Significance tests: paired over examples, and Welch's t-test over seeds.

Sources: paired bootstrap: Efron and Tibshirani (1993), chapters 13 and 16, as in Koehn (2004);
approximate randomisation: Noreen (1989), chapter 2, as in Yeh (2000); t-test: Welch (1947).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_deberta.tasks.metrics import Floats, PairedMetric

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

"""Several corpora in fixed proportions.

Owns which component sample i comes from, as a pure function of i. Refuses to draw lots: every
component is less than one sample away from its share of the first n samples, for every n.

Source: Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32: with k
components nobody is further than 1 - 1/(2k - 2) from their share if, among those that are at
least 1/(2k - 2) behind, the one whose delay would grow too large soonest is next. Taking the
largest deficit, as Megatron does, does not keep that promise.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.rows import RowBatch, RowSource, join
from megatron_deberta.errors import ConfigError

LONGEST_PERIOD = 1 << 20
"""Samples after which the pattern repeats at the latest."""


class BlendedRows:
    """Rows of several sources in proportion to weights.

    Weights are fractions of small whole numbers more often than not, as 0.3 and 0.7 are; then the
    pattern repeats exactly after their sum. Others are rounded to 1 / ``LONGEST_PERIOD``, which
    moves a share by less than one sample in a million. Either way the pattern is a table, and any
    index is found at once. Each source counts its own rows on.

    Args:
        sources: the components.
        weights: positive, one a component, of any sum.

    Attributes:
        period: samples after which the pattern repeats.

    Raises:
        ConfigError: a weight is not positive or below a share of 1 / ``LONGEST_PERIOD``.
    """

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float]) -> None:
        """See the class."""
        self._sources = tuple(sources)
        shares = _integer_shares(weights)
        self._shares = np.array(shares)
        self.period = sum(shares)
        self._components = _even_pattern(shares)
        self._before = np.empty(self.period, np.int32)
        for component, share in enumerate(shares):
            self._before[self._components == component] = np.arange(share)

    def rows(self, indices: npt.NDArray[np.int64]) -> RowBatch:
        """Return the rows of the given indices >= 0 of the mixture, in that order."""
        components, local = self.locate(indices)
        used = np.unique(components).tolist()
        places = [np.flatnonzero(components == component) for component in used]
        parts = [
            self._sources[component].rows(local[place])
            for component, place in zip(used, places, strict=True)
        ]
        return join(parts, places)

    def locate(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the component of each row of the mixture and the row's index there."""
        periods, slots = np.divmod(indices, self.period)
        components = self._components[slots].astype(np.int64)
        return components, periods * self._shares[components] + self._before[slots]


def _even_pattern(shares: Sequence[int]) -> npt.NDArray[np.uint16]:
    """Return which component comes at each of ``sum(shares)`` places, by Tijdeman's rule.

    Unit number j of a component may come from place ``(j + d) P / share`` on, and must have come
    by ``(j + 1 - d) P / share``, with d = 1 / (2k - 2) and places counted from 1; the earliest
    deadline is next.
    """
    period, slack = sum(shares), max(2 * len(shares) - 2, 1)
    pattern = np.zeros(period, np.uint16)
    if len(shares) == 1:
        return pattern
    waiting = [(-(-period // (share * slack)), number) for number, share in enumerate(shares)]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    counts = [0] * len(shares)
    for place in range(1, period + 1):
        while waiting and waiting[0][0] <= place:
            number = heapq.heappop(waiting)[1]
            deadline = period * (slack * counts[number] + slack - 1) // (slack * shares[number])
            heapq.heappush(ready, (deadline, number))
        number = heapq.heappop(ready)[1]
        pattern[place - 1] = number
        counts[number] += 1
        release = -(-period * (slack * counts[number] + 1) // (slack * shares[number]))
        heapq.heappush(waiting, (release, number))
    return pattern


def _integer_shares(weights: Sequence[float]) -> list[int]:
    """Bring weights to whole numbers, exactly if their sum is small enough, else rounded."""
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"data.train: weights {list(weights)} must be positive numbers")
    # What was written in decimals is meant in decimals.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) <= LONGEST_PERIOD:
        return whole
    parts = [Fraction(weight * LONGEST_PERIOD, sum(whole)) for weight in whole]
    shares = [math.floor(part) for part in parts]
    by_rest = sorted(range(len(parts)), key=lambda number: shares[number] - parts[number])
    for number in by_rest[: LONGEST_PERIOD - sum(shares)]:
        shares[number] += 1
    if min(shares) < 1:
        raise ConfigError(
            f"data.train: weights {list(weights)} give a prefix less than 1/{LONGEST_PERIOD} of "
            "the samples; raise its weight or leave it out"
        )
    return shares

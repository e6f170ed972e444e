"""Blending of several corpora in fixed proportions.

The component of sample i is a pure function of i. Each component's number of samples among the
first n differs from its share by less than one, for every n.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_deberta.data import Integers
from megatron_deberta.data.dataset.index_cache import LatestTwo
from megatron_deberta.data.dataset.rows import RowBatch, RowSource, read_groups
from megatron_deberta.errors import ConfigError

# Samples of the longest table; weights with a longer period use tables of blocks.
LONGEST_PERIOD = 1 << 20
_LEAST_BLOCK = 1 << 14
# Maps a component and the number of one of its samples to that sample's first and last place.
Window = Callable[[int, int], tuple[int, int]]


class _Table(NamedTuple):
    """Component of each of consecutive samples of the blend, and the row index in it."""

    components: npt.NDArray[np.uint16]
    local: Integers


class BlendedRows:
    """Rows of several sources in proportion to weights.

    Weights in lowest terms, such as 3 and 7 for 0.3 and 0.7, repeat with their sum as the period.
    A short period is one table. For a long one (token counts, square roots) a table holds a block
    of samples, computed from its number alone, and the two used last are kept. Shares are exact.

    Args:
        sources: the components.
        weights: positive, one per component, of any sum.

    Attributes:
        period: samples after which the pattern repeats.

    Raises:
        ConfigError: a weight is not positive or below a share of 1 / ``LONGEST_PERIOD``.
    """

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float]) -> None:
        """See the class."""
        self._sources = tuple(sources)
        self._shares = _whole_shares(weights)
        self.period = sum(self._shares)
        # Maximum distance between samples of the smallest component.
        self._reach = -(-self.period // min(self._shares))
        if self._reach > LONGEST_PERIOD:
            raise ConfigError(
                f"data.train: weights {list(weights)} give a prefix less than 1/{LONGEST_PERIOD} "
                "of the samples; raise its weight or leave it out"
            )
        self._repeats = self.period <= LONGEST_PERIOD
        self._block = self.period if self._repeats else max(_LEAST_BLOCK, self._reach)
        self._table_of = LatestTwo(self._schedule)

    def rows(self, indices: Integers) -> RowBatch:
        """Return the rows of the given indices >= 0 of the blend, in that order."""
        components, local = self.locate(indices)
        return read_groups(components, lambda number, at: self._sources[number].rows(local[at]))

    def locate(self, indices: Integers) -> tuple[Integers, Integers]:
        """Return the component of each row of the blend and the row's index in it."""
        blocks, slots = np.divmod(indices, self._block)
        if self._repeats:
            table = self._table_of(0)
            components = table.components[slots].astype(np.int64)
            return components, blocks * np.array(self._shares)[components] + table.local[slots]
        components, local = np.empty_like(slots), np.empty_like(slots)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            table = self._table_of(block)
            components[here] = table.components[slots[here]]
            local[here] = table.local[slots[here]]
        return components, local

    def parts(self, begin: int, end: int) -> Iterator[tuple[RowSource, int, int]]:
        """Yield each source, and a range of its rows that covers rows ``begin`` to ``end``."""
        for source, share in zip(self._sources, self._shares, strict=True):
            # A count differs from its share by less than one.
            yield source, max(0, share * begin // self.period - 1), share * end // self.period + 2

    def _schedule(self, block: int) -> _Table:
        if self._repeats:
            return _table(_even_pattern(self._shares), [0] * len(self._shares))
        begin, end = block * self._block, (block + 1) * self._block
        counts = self._counts_at(begin)
        limits = self._counts_at(end)
        return _table(_earliest_deadline_first(self._window, counts, begin, end, limits), counts)

    def _counts_at(self, place: int) -> list[int]:
        """Return the samples of each component among the first ``place``, at a block's edge.

        Not every rounding of the shares can be continued on both sides. This one can, by Hall's
        theorem on the windows of the samples. Forward: it follows a schedule that started from
        ``_round_shares`` ``_reach`` places earlier and kept all deadlines, which can go on
        indefinitely. Backward: all samples due in those places came, and no window is longer.
        Blocks are at least ``_reach`` long, so counts never decrease from edge to edge.
        """
        if place == 0:
            return [0] * len(self._shares)
        begin = place - self._reach
        counts = self._round_shares(begin)
        pattern = _earliest_deadline_first(self._window, counts, begin, place)
        added = np.bincount(pattern, minlength=len(counts)).tolist()
        return [count + more for count, more in zip(counts, added, strict=True)]

    def _round_shares(self, place: int) -> list[int]:
        """Round the shares of the first samples, up those with the earliest next deadline.

        All samples due by any later place then fit: if one rounded down is among them, so are all
        rounded up, as in a schedule without rounding; if none is, those rounded up have had more
        than their share.
        """
        counts = [share * place // self.period for share in self._shares]
        between = [n for n, share in enumerate(self._shares) if share * place % self.period]
        between.sort(key=lambda number: self._window(number, counts[number])[1])
        for number in between[: place - sum(counts)]:
            counts[number] += 1
        return counts

    def _window(self, number: int, sample: int) -> tuple[int, int]:
        """Return the places of a sample that keep its component within one sample of its share."""
        share = self._shares[number]
        return sample * self.period // share + 1, -(-(sample + 1) * self.period // share)


def _table(pattern: npt.NDArray[np.uint16], counts: Sequence[int]) -> _Table:
    """Number each component's rows, starting at ``counts``."""
    local = np.empty(len(pattern), np.int64)
    for component, count in enumerate(counts):
        places = np.flatnonzero(pattern == component)
        local[places] = np.arange(count, count + places.size)
    return _Table(pattern, local)


def _even_pattern(shares: Sequence[int]) -> npt.NDArray[np.uint16]:
    """Return the component at each of ``sum(shares)`` places, by Tijdeman's rule.

    Sample j of one of k components comes from place ``(j + d) P / share`` to place
    ``(j + 1 - d) P / share``, with d = 1 / (2k - 2) and places counted from 1.

    Source: Tijdeman 1980, "The chairman assignment problem".
    """
    period, slack = sum(shares), max(2 * len(shares) - 2, 1)

    def window(number: int, sample: int) -> tuple[int, int]:
        parts = slack * shares[number]
        release = -(-period * (slack * sample + 1) // parts)
        return release, period * (slack * sample + slack - 1) // parts

    if len(shares) == 1:
        return np.zeros(period, np.uint16)
    return _earliest_deadline_first(window, [0] * len(shares), 0, period)


def _earliest_deadline_first(
    window: Window,
    counts: Sequence[int],
    begin: int,
    end: int,
    limits: Sequence[int] | None = None,
) -> npt.NDArray[np.uint16]:
    """Schedule components at places ``begin + 1`` to ``end``, earliest deadline first.

    This keeps all windows if any schedule does.

    Args:
        window: of each sample.
        counts: samples of each component before.
        begin: places before.
        end: the last place.
        limits: samples of each component at the end; None: any.
    """
    pattern = np.zeros(end - begin, np.uint16)
    counts = list(counts)
    numbers = [n for n, count in enumerate(counts) if limits is None or count < limits[n]]
    waiting = [(*window(number, counts[number]), number) for number in numbers]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    for place in range(begin + 1, end + 1):
        while waiting and waiting[0][0] <= place:
            _, deadline, number = heapq.heappop(waiting)
            heapq.heappush(ready, (deadline, number))
        number = heapq.heappop(ready)[1]
        pattern[place - begin - 1] = number
        counts[number] += 1
        if limits is None or counts[number] < limits[number]:
            heapq.heappush(waiting, (*window(number, counts[number]), number))
    return pattern


def _whole_shares(weights: Sequence[float]) -> list[int]:
    """Return weights as integers in lowest terms."""
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"data.train: weights {list(weights)} must be positive numbers")
    # By way of str, so that decimals are exact.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    return [weight // divisor for weight in whole]

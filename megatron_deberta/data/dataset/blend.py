"""Blending of several corpora in fixed proportions.

The component of sample i is a pure function of i. Every component is less than one sample away from
its share of the first n samples, for every n.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.dataset.rows import RowBatch, RowSource, join
from megatron_deberta.errors import ConfigError

LONGEST_PERIOD = 1 << 20
"""Samples of the longest table: weights with a longer period are taken block by block."""
_LEAST_BLOCK = 1 << 14
Window = Callable[[int, int], tuple[int, int]]
"""From a component and the number of one of its units to the first and last place of that unit."""


class _Table(NamedTuple):
    """Some neighbouring samples of the mixture."""

    components: npt.NDArray[np.uint16]
    """Which component each comes from."""
    local: npt.NDArray[np.int64]
    """The row's index there."""


class BlendedRows:
    """Rows of several sources in proportion to weights.

    Weights are fractions of small whole numbers more often than not, as 0.3 and 0.7 are; then the
    pattern repeats exactly after their sum and is one table. Token counts and square roots are
    not; then a table holds a block of the samples, and the two used last are kept. A block is
    found from its number alone. Either way shares are exact, and each source counts its own rows
    on.

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
        self._shares = _whole_shares(weights)
        self.period = sum(self._shares)
        # The smallest component has a unit at least every so many samples.
        self._reach = -(-self.period // min(self._shares))
        if self._reach > LONGEST_PERIOD:
            raise ConfigError(
                f"data.train: weights {list(weights)} give a prefix less than 1/{LONGEST_PERIOD} "
                "of the samples; raise its weight or leave it out"
            )
        self._tables: dict[int, _Table] = {}
        self._repeats = self.period <= LONGEST_PERIOD
        if self._repeats:
            self._block = self.period
            pattern = _even_pattern(self._shares)
            self._tables[0] = _table(pattern, [0] * len(self._shares))
        else:
            self._block = max(_LEAST_BLOCK, self._reach)

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
        blocks, slots = np.divmod(indices, self._block)
        if self._repeats:
            table = self._tables[0]
            components = table.components[slots].astype(np.int64)
            return components, blocks * np.array(self._shares)[components] + table.local[slots]
        components, local = np.empty_like(slots), np.empty_like(slots)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            table = self._table_of(block)
            components[here] = table.components[slots[here]]
            local[here] = table.local[slots[here]]
        return components, local

    def _table_of(self, block: int) -> _Table:
        if block not in self._tables:
            if len(self._tables) > 1:
                # A batch may lie in two blocks.
                del self._tables[min(self._tables)]
            begin, end = block * self._block, (block + 1) * self._block
            counts = self._counts_at(begin)
            pattern = _in_time(self._window, counts, begin, end, self._counts_at(end))
            self._tables[block] = _table(pattern, counts)
        return self._tables[block]

    def _counts_at(self, place: int) -> list[int]:
        """Return the units of each component up to and with the last place of a block.

        Any rounding of the shares there keeps the promise itself, but not all leave a way to keep
        it before and after. This one does (Hall's theorem on the units' windows). After it,
        because some places earlier it began at ``_never_late`` and in time: what has begun that
        way can go on for ever. Before it, because all that must come in the last ``_reach``
        places did, and no unit has a window so long that earlier places could matter. Blocks are
        not shorter than that, so that no unit can be counted at a begin and not at the end.
        """
        if place == 0:
            return [0] * len(self._shares)
        begin = place - self._reach
        counts = self._never_late(begin)
        pattern = _in_time(self._window, counts, begin, place)
        added = np.bincount(pattern, minlength=len(counts)).tolist()
        return [count + more for count, more in zip(counts, added, strict=True)]

    def _never_late(self, place: int) -> list[int]:
        """Round the shares of the first samples, up those whose next unit must come soonest.

        All units due up to a later place then fit between: if one that was rounded down is among
        them, all that were rounded up are, and the units are those of a schedule without
        rounding; if none is, those rounded up have had more than their share.
        """
        counts = [share * place // self.period for share in self._shares]
        between = [n for n, share in enumerate(self._shares) if share * place % self.period]
        between.sort(key=lambda number: self._window(number, counts[number])[1])
        for number in between[: place - sum(counts)]:
            counts[number] += 1
        return counts

    def _window(self, number: int, unit: int) -> tuple[int, int]:
        """Say where a unit keeps its component less than one sample from its share."""
        share = self._shares[number]
        return unit * self.period // share + 1, -(-(unit + 1) * self.period // share)


def _table(pattern: npt.NDArray[np.uint16], counts: Sequence[int]) -> _Table:
    """Number each component's rows on from ``counts``."""
    local = np.empty(len(pattern), np.int64)
    for component, count in enumerate(counts):
        places = np.flatnonzero(pattern == component)
        local[places] = np.arange(count, count + places.size)
    return _Table(pattern, local)


def _even_pattern(shares: Sequence[int]) -> npt.NDArray[np.uint16]:
    """Return which component comes at each of ``sum(shares)`` places, by Tijdeman's rule.

    Unit number j of a component may come from place ``(j + d) P / share`` on, and must have come
    by ``(j + 1 - d) P / share``, with d = 1 / (2k - 2) and places counted from 1.
    """
    period, slack = sum(shares), max(2 * len(shares) - 2, 1)

    def window(number: int, unit: int) -> tuple[int, int]:
        parts = slack * shares[number]
        release = -(-period * (slack * unit + 1) // parts)
        return release, period * (slack * unit + slack - 1) // parts

    if len(shares) == 1:
        return np.zeros(period, np.uint16)
    return _in_time(window, [0] * len(shares), 0, period)


def _in_time(
    window: Window,
    counts: Sequence[int],
    begin: int,
    end: int,
    limits: Sequence[int] | None = None,
) -> npt.NDArray[np.uint16]:
    """Return which component comes at each of the places ``begin + 1`` to ``end``.

    Of the units whose windows are open, the one whose window closes first is next. That finds a
    way to keep all windows where there is one.

    Args:
        window: of each unit.
        counts: units of each component before.
        begin: places before.
        end: the last place.
        limits: units of each component at the end; None where that is free.
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
        unit = counts[number] = counts[number] + 1
        if limits is None or unit < limits[number]:
            heapq.heappush(waiting, (*window(number, unit), number))
    return pattern


def _whole_shares(weights: Sequence[float]) -> list[int]:
    """Bring weights to whole numbers in lowest terms."""
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"data.train: weights {list(weights)} must be positive numbers")
    # What was written in decimals is meant in decimals.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    return [weight // divisor for weight in whole]

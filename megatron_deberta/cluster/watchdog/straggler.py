"""Which rank is slower than the others, and in what?

Owns the comparison, from sums that every rank keeps anyway. Refuses collectives and decisions: a
slow rank is told, never ended.

Compared is what a rank does by itself: waiting for its batches, and its forward passes. Backward
and update hold the collectives of the batch's ranks, in which all wait for the slowest. Ranks that
split a layer wait for each other in forward, too: of those, all are slow together. Before forward
the batch's ranks add up their masks, so a rank whose batches come late keeps half of the grid
waiting there, and the rest in forward. Forward passes are compared where no batches come late.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

LEAST_SHARE = 0.1
"""Of a step: what a rank loses has to be more than that to be told."""
WINDOWS = 2
"""In so many windows in a row a rank has to be slow."""

Times = tuple[int, int, int, int]
"""Steps, and nanoseconds in data, forward and whole steps; sums since the start."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that keeps the others waiting."""

    rank: int
    part: str
    """``data`` or ``forward``, whichever loses more."""
    factor: float
    """Its own time over the median rank's."""
    lost_seconds: float
    """Of every step, against the median."""


class StragglerWatch:
    """Compares ranks over windows of steps.

    Args:
        factor: how much slower than the median rank is slow.
        window: steps.
    """

    def __init__(self, factor: float, window: int) -> None:
        self._factor = factor
        self._window = window
        self._begin: dict[int, Times] = {}
        self._slow: dict[int, int] = {}

    def update(self, sums: Mapping[int, Times]) -> tuple[Straggler, ...] | None:
        """Look at the sums of all ranks.

        Returns:
            Who is slow, worst first; None before every rank has done the steps of a window.
        """
        if self._begin.keys() != sums.keys():
            self._begin = dict(sums)
            return None
        passed = {
            rank: tuple(
                now - before for now, before in zip(sums[rank], self._begin[rank], strict=True)
            )
            for rank in sums
        }
        if min(steps for steps, *_ in passed.values()) < self._window:
            return None
        self._begin = dict(sums)
        means = {
            rank: (data / steps, forward / steps, whole / steps)
            for rank, (steps, data, forward, whole) in passed.items()
        }
        slow = self._compare(means)
        self._slow = {item.rank: self._slow.get(item.rank, 0) + 1 for item in slow}
        told = [item for item in slow if self._slow[item.rank] >= WINDOWS]
        return tuple(sorted(told, key=lambda item: -item.lost_seconds))

    def _compare(self, means: Mapping[int, tuple[float, float, float]]) -> list[Straggler]:
        # The lower one of two, so that of two ranks one can be slow.
        data, forward, whole = (
            statistics.median_low(mean[part] for mean in means.values()) for part in range(3)
        )
        own = max(data + forward, 1.0)
        for part, name, usual in ((0, "data", data), (1, "forward", forward)):
            slow = []
            for rank, mean in means.items():
                lost = mean[part] - usual
                if own + lost > self._factor * own and lost > LEAST_SHARE * whole:
                    slow.append(Straggler(rank, name, (own + lost) / own, lost / 1e9))
            if slow:
                return slow
        return []

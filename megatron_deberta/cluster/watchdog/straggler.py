"""Detection of stragglers: ranks that are slower than the median rank.

Compared are the times that a rank spends by itself: waiting for its batches, and its forward
passes. Backward and update contain data-parallel collectives, in which all ranks wait for the
slowest. Tensor-parallel ranks wait for each other in forward, so all of a group appear slow. A
rank whose batches are late delays the others' forward passes as well (the ranks of a batch sum
their masks before it), so forward passes are compared only if no rank's batches are late.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

MIN_LOST_SHARE = 0.1
"""A straggler loses at least this share of a step."""
WINDOWS = 2
"""Consecutive windows in which a rank must be slow to be reported."""

Times = tuple[int, int, int, int]
"""Steps, and nanoseconds in data, forward and whole steps; sums since the start."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow rank."""

    rank: int
    part: str
    """``data`` or ``forward``, whichever loses more time."""
    factor: float
    """Its own time over the median rank's."""
    lost_seconds: float
    """Per step, against the median rank."""


class StragglerWatch:
    """Compares ranks over windows of steps.

    Args:
        factor: report a rank whose own time exceeds this multiple of the median.
        window: steps per window.
    """

    def __init__(self, factor: float, window: int) -> None:
        self._factor = factor
        self._window = window
        self._begin: dict[int, Times] = {}
        self._slow_windows: dict[int, int] = {}

    def update(self, sums: Mapping[int, Times]) -> tuple[Straggler, ...] | None:
        """Compare the ranks if every one has done the steps of a window.

        Returns:
            The stragglers, slowest first; None before the end of a window.
        """
        if self._begin.keys() != sums.keys():
            self._begin = dict(sums)
            return None
        deltas = {
            rank: tuple(
                now - before for now, before in zip(sums[rank], self._begin[rank], strict=True)
            )
            for rank in sums
        }
        if min(steps for steps, *_ in deltas.values()) < self._window:
            return None
        self._begin = dict(sums)
        means = {
            rank: (data / steps, forward / steps, whole / steps)
            for rank, (steps, data, forward, whole) in deltas.items()
        }
        slow = self._compare(means)
        self._slow_windows = {item.rank: self._slow_windows.get(item.rank, 0) + 1 for item in slow}
        reported = [item for item in slow if self._slow_windows[item.rank] >= WINDOWS]
        return tuple(sorted(reported, key=lambda item: -item.lost_seconds))

    def _compare(self, means: Mapping[int, tuple[float, float, float]]) -> list[Straggler]:
        # The lower median, so that one of two ranks can be slow.
        data, forward, whole = (
            statistics.median_low(mean[part] for mean in means.values()) for part in range(3)
        )
        own = max(data + forward, 1.0)
        for part, name, median in ((0, "data", data), (1, "forward", forward)):
            slow = []
            for rank, mean in means.items():
                lost = mean[part] - median
                if own + lost > self._factor * own and lost > MIN_LOST_SHARE * whole:
                    slow.append(Straggler(rank, name, (own + lost) / own, lost / 1e9))
            if slow:
                return slow
        return []

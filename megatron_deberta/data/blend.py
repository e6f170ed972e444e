"""Several corpora in fixed proportions.

Owns which component sample i comes from, as a pure function of i. Refuses to draw lots: at every
index the component that is furthest behind its share is next, as in Megatron, so that the mix is
even at every scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.packing import Row, RowSource
from megatron_deberta.errors import ConfigError

PERIOD = 10_000
"""Samples after which the pattern repeats; weights are rounded to this resolution."""


class BlendedRows:
    """Rows of several sources in proportion to weights.

    Over each ``PERIOD`` indices the shares are exact, and inside it the largest deficit wins; so
    the pattern is a table and any index is found at once. Each source counts its own rows on.

    Args:
        sources: the components.
        weights: positive, one a component, of any sum.

    Raises:
        ConfigError: a weight is not positive or below a share of 1 / PERIOD.
    """

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float]) -> None:
        """See the class."""
        self._sources = tuple(sources)
        self._shares = _integer_shares(np.asarray(weights, np.float64))
        deficits = np.zeros(len(sources), np.int64)
        counts = np.zeros(len(sources), np.int64)
        pattern = []
        for _ in range(PERIOD):
            deficits += self._shares
            component = int(np.argmax(deficits))
            deficits[component] -= PERIOD
            pattern.append((component, int(counts[component])))
            counts[component] += 1
        self._pattern = pattern

    def row(self, index: int) -> Row:
        """Return row ``index`` >= 0 of the mixture."""
        component, local = self.locate(index)
        return self._sources[component].row(local)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the component of row ``index`` and the row's index there."""
        period, slot = divmod(index, PERIOD)
        component, before = self._pattern[slot]
        return component, period * int(self._shares[component]) + before


def _integer_shares(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Round weights to shares of PERIOD that sum to it, by largest remainder."""
    if not np.isfinite(weights).all() or (weights <= 0).any():
        raise ConfigError(f"data.train: weights {weights.tolist()} must be positive numbers")
    exact = weights / weights.sum() * PERIOD
    shares: npt.NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    missing = PERIOD - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
    if (shares < 1).any():
        raise ConfigError(
            f"data.train: weights {weights.tolist()} give a prefix less than 1/{PERIOD} of the "
            "samples; raise its weight or leave it out"
        )
    return shares

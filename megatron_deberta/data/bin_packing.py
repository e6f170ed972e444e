"""Best-fit-decreasing assignment of items to bins."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from megatron_deberta.data.arrays import Integers


def best_fit(sizes: Integers, capacity: int) -> tuple[Integers, int]:
    """Assign items to bins, largest first, each to the fullest bin with room for it.

    Items of one size are assigned together, so the time depends on the number of different sizes
    and only linearly on the number of items.

    Args:
        sizes: [n] sizes from 1 to ``capacity``, in descending order.
        capacity: of a bin.

    Returns:
        [n] int64 bin of each item, and the number of bins.
    """
    bins = np.empty(sizes.size, np.int64)
    open_bins: dict[int, list[Integers]] = defaultdict(list)
    num_bins = 0
    values, counts = np.unique(-sizes, return_counts=True)
    begins = np.cumsum(counts) - counts
    for negative, count, begin in zip(
        values.tolist(), counts.tolist(), begins.tolist(), strict=True
    ):
        size, done = -negative, 0
        for room in sorted(room for room in open_bins if room >= size):
            if done == count:
                break
            ids = np.concatenate(open_bins.pop(room))
            done += _fill(ids, room, size, bins[begin + done : begin + count], open_bins)
        if done < count:
            needed = -(-(count - done) // (capacity // size))
            ids = np.arange(num_bins, num_bins + needed)
            num_bins += needed
            _fill(ids, capacity, size, bins[begin + done : begin + count], open_bins)
    return bins, num_bins


def _fill(
    ids: Integers, room: int, size: int, target: Integers, open_bins: dict[int, list[Integers]]
) -> int:
    """Put items of one size into bins with the same room; return how many."""
    per_bin = room // size
    taken = min(target.size, ids.size * per_bin)
    target[:taken] = np.repeat(ids, per_bin)[:taken]
    full, part = divmod(taken, per_bin)
    edges = (
        (ids[:full], per_bin),
        (ids[full : full + (part > 0)], part),
        (ids[full + (part > 0) :], 0),
    )
    for group, items in edges:
        if group.size and room > items * size:
            open_bins[room - items * size].append(group)
    return taken

"""Buckets with too many documents for all their pairs: what stays of them is compared.

A page's hundred revisions share buckets. There a document is paired with the eight before it, which
may all go because of one before them; so one that would stay is compared with those that do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_deberta.deduplicate.candidates import CROWDED, Numbers
from megatron_deberta.deduplicate.compare import (
    RunSets,
    estimate_jaccard,
    jaccard_of,
    num_candidate_tasks,
)
from megatron_deberta.deduplicate.work import Work

STAYING = 64
"""Of a bucket a document is compared with the first that stays and the last so many."""


class CrowdedBuckets:
    """Holds, on disk, which documents stay of each crowded bucket; they are added in order.

    Args:
        work: with its runs of words collected.
        starts: see ``unit_starts``.
        folder: for two files, ``*.tmp``, that are of no use afterwards.
    """

    def __init__(self, work: Work, starts: Numbers, folder: Path) -> None:
        """See the class."""
        self._work = work
        self._starts = starts
        self._runs = RunSets(work, starts)
        self._tasks = range(num_candidate_tasks(work, int(starts[-1])))
        sizes = [work.load("candidates", task, CROWDED[2]) for task in self._tasks]
        self._first_bucket = np.cumsum([0, *(len(each) for each in sizes)])
        self._slots = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
        self._staying = _new_map(folder / "staying.tmp", int(self._slots[-1]))
        self._filled = _new_map(folder / "filled.tmp", len(self._slots) - 1)

    def of_unit(self, unit: int) -> tuple[Numbers, Numbers]:
        """Return the unit's documents that are in crowded buckets, and the buckets, by document."""
        begin, end = self._starts[unit : unit + 2]
        documents, buckets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for task in self._tasks:
            document, bucket = (self._work.load("candidates", task, name) for name in CROWDED[:2])
            part = slice(*np.searchsorted(document, (begin, end)))
            documents.append(document[part])
            buckets.append(bucket[part] + self._first_bucket[task])
        together = np.concatenate(documents)
        order = np.argsort(together, kind="stable")
        return together[order], np.concatenate(buckets)[order]

    def most_alike(self, document: int, buckets: Numbers) -> tuple[int, float]:
        """Return the most similar document that stays of some buckets, and the Jaccard similarity.

        -1 and 0 where none reaches the threshold.
        """
        others = [np.empty(0, np.int64)]
        for bucket in buckets.tolist():
            begin, count = int(self._slots[bucket]), int(self._filled[bucket])
            others.append(self._staying[begin : begin + min(count, 1)])
            others.append(self._staying[begin + max(1, count - STAYING) : begin + count])
        earlier = np.unique(np.concatenate(others))
        settings = self._work.settings
        if earlier.size:
            later = np.full_like(earlier, document)
            alike = estimate_jaccard(self._work, self._starts, later, earlier)
            earlier = earlier[alike >= settings.least_estimate]
        best, similarity = -1, 0.0
        for other in earlier.tolist():
            jaccard = jaccard_of(self._runs.of(document), self._runs.of(other))
            if jaccard >= settings.threshold and jaccard > similarity:
                best, similarity = other, jaccard
        return best, similarity

    def add(self, document: int, buckets: Numbers) -> None:
        """Say that a document stays."""
        filled = self._filled[buckets]
        self._staying[self._slots[buckets] + filled] = document
        self._filled[buckets] = filled + 1


def _new_map(path: Path, size: int) -> Numbers:
    # Its blocks are zero until they are written.
    return np.memmap(path, np.int64, mode="w+", shape=(max(size, 1),))

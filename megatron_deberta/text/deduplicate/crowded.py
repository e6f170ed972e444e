"""Documents of buckets that are too large to compare all their pairs.

There, a document is paired with the eight before it, which may all be removed because of an
earlier one; a document that would be kept is therefore also compared with those that are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_deberta.text.deduplicate.candidates import CROWDED, Numbers
from megatron_deberta.text.deduplicate.compare import RunSets, jaccard_of, num_candidate_tasks
from megatron_deberta.text.deduplicate.settings import PERMUTATIONS
from megatron_deberta.text.deduplicate.sign import gather_signatures
from megatron_deberta.text.deduplicate.work import TaskFolder, Work

# Of a bucket a document is compared with the first that stays and the last so many.
STAYING = 64
# Of those so many are compared by their words: pages of one template may share all buckets.
COMPARED = 32


class CrowdedBuckets:
    """Holds, on disk, which documents stay of each crowded bucket; they are added in order.

    Args:
        work: with its runs of words collected.
        starts: see ``unit_starts``.
        folder: of the task, for temporary maps.
    """

    def __init__(self, work: Work, starts: Numbers, folder: TaskFolder) -> None:
        """See the class."""
        self._work = work
        self._starts = starts
        self._runs = RunSets(work, starts)
        self._tasks = range(num_candidate_tasks(work, int(starts[-1])))
        sizes = [work.load("candidates", task, CROWDED[2]) for task in self._tasks]
        self._first_bucket = np.cumsum([0, *(len(each) for each in sizes)])
        self._begins = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
        entries = int(self._begins[-1])
        most = min(entries, int(starts[-1]))
        # Of each document that stays, in order: its number and its sketch, which many ask for.
        self._count = 0
        self._documents = folder.new_map("documents", np.int64, most)
        self._sketches = folder.new_map("sketches", np.uint32, most, PERMUTATIONS)
        # Of each bucket: how many stay, and their places among those.
        self._filled = folder.new_map("filled", np.int64, len(self._begins) - 1)
        self._staying = folder.new_map("staying", np.int64, entries)

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
        settings = self._work.settings
        others = [np.empty(0, np.int64)]
        for bucket in buckets.tolist():
            begin, count = int(self._begins[bucket]), int(self._filled[bucket])
            others.append(self._staying[begin : begin + min(count, 1)])
            others.append(self._staying[begin + max(1, count - STAYING) : begin + count])
        places = np.unique(np.concatenate(others))
        estimates = (self._sketches[places] == self._sketch(document)).mean(axis=1)
        likely = np.argsort(-estimates, kind="stable")[:COMPARED]
        likely = np.sort(likely[estimates[likely] >= settings.least_estimate])
        best, similarity = -1, 0.0
        for other in self._documents[places[likely]].tolist():
            jaccard = jaccard_of(self._runs.of(document), self._runs.of(other))
            if jaccard >= settings.threshold and jaccard > similarity:
                best, similarity = other, jaccard
        return best, similarity

    def add(self, document: int, buckets: Numbers) -> None:
        """Say that a document stays."""
        filled = self._filled[buckets]
        self._staying[self._begins[buckets] + filled] = self._count
        self._filled[buckets] = filled + 1
        self._documents[self._count] = document
        self._sketches[self._count] = self._sketch(document)
        self._count += 1

    def _sketch(self, document: int) -> Any:
        return gather_signatures(self._work, self._starts, np.array([document]), "sketch")[0]

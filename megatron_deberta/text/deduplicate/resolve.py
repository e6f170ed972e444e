"""Which documents are kept, and which form a cluster.

In input order, a document is removed if it is the same as, or a near duplicate of, one that is
kept. A cluster holds all documents that a chain of near duplicates connects. Uses memory maps.

In a bucket that is too large to compare all its pairs, a document is paired with the eight before
it, which may all be removed because of an earlier one; a document that would be kept is therefore
also compared with those that are (``CrowdedBuckets``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_deberta.text.deduplicate.pairs import (
    CROWDED,
    Numbers,
    RunSets,
    jaccard_of,
    num_candidate_tasks,
    num_parts,
)
from megatron_deberta.text.deduplicate.sign import (
    PERMUTATIONS,
    gather_signatures,
    settings_of,
    unit_starts,
)
from megatron_deberta.text.jobs.stages import TaskFolder, Work

# Fates of a document.
KEPT, EXACT, NEAR = 0, 1, 2
# Of a bucket a document is compared with the first that stays and the last so many.
STAYING = 64
# Of those so many are compared by their words: pages of one template may share all buckets.
COMPARED = 32


def resolve(work: Work, task: int, folder: TaskFolder) -> None:
    """Decide on every document whether it is kept.

    Saves ``decision`` [documents] uint8, ``kept`` int64 (for each document that goes, the one that
    stays in its place), ``jaccard`` float64, ``clusters`` (see ``_save_clusters``), and
    ``lines.json``: for each unit, the lines of each file before it.

    Arguments as in ``check_task``.
    """
    total = max(int(unit_starts(work)[-1]), 1)
    decision = folder.new_map("decision", np.uint8, total)
    kept = folder.new_map("kept", np.int64, total)
    jaccard = folder.new_map("jaccard", np.float64, total)
    parent = folder.new_map("parent", np.int64, total)
    for begin in range(0, total, 1 << 20):
        end = min(begin + (1 << 20), total)
        kept[begin:end] = parent[begin:end] = np.arange(begin, end)
    jaccard[:] = 1.0
    if not settings_of(work).exact_only:
        _resolve_near(work, folder, parent, decision, kept, jaccard)
    for part in range(num_parts(total)):
        duplicates = work.load("exact", part, "duplicate")
        firsts = work.load("exact", part, "first")
        # What the first is a near duplicate of, so are its copies.
        decision[duplicates] = np.where(decision[firsts] == KEPT, EXACT, NEAR)
        kept[duplicates] = kept[firsts]
        jaccard[duplicates] = jaccard[firsts]
    _save_clusters(work, parent, folder)
    for name, array in (("decision", decision), ("kept", kept), ("jaccard", jaccard)):
        folder.save_array(name, array)
    folder.save_json("lines", _lines_before(work))


def _resolve_near(
    work: Work, folder: TaskFolder, parent: Any, decision: Any, kept: Any, jaccard: Any
) -> None:
    crowded = CrowdedBuckets(work, folder)
    for unit in range(len(work.units)):
        for document, pairs, buckets in _by_document(work, crowded, unit):
            best, similarity = -1, 0.0
            for earlier, found in pairs:
                _join(parent, document, earlier)
                if decision[earlier] == KEPT and found > similarity:
                    best, similarity = earlier, found
            if best < 0 and buckets.size:
                best, similarity = crowded.most_alike(document, buckets)
                if best < 0:
                    crowded.add(document, buckets)
                else:
                    _join(parent, document, best)
            if best >= 0:
                decision[document], kept[document], jaccard[document] = NEAR, best, similarity


def _by_document(
    work: Work, crowded: CrowdedBuckets, unit: int
) -> Iterator[tuple[int, list[tuple[int, float]], Numbers]]:
    """Yield the documents of a unit that may be removed, in order.

    Each comes with its earlier near duplicates, their similarity, and its crowded buckets.
    """
    later, earlier, similarity = (
        np.array(work.load("verify", unit, name)) for name in ("later", "earlier", "jaccard")
    )
    member, bucket = crowded.of_unit(unit)
    documents = np.union1d(later, member)
    pair_bounds, bucket_bounds = (
        np.append(np.searchsorted(each, documents), len(each)).tolist() for each in (later, member)
    )
    for place, document in enumerate(documents.tolist()):
        begin, end = pair_bounds[place : place + 2]
        pairs = list(zip(earlier[begin:end].tolist(), similarity[begin:end].tolist(), strict=True))
        yield document, pairs, bucket[slice(*bucket_bounds[place : place + 2])]


def _root(parent: Any, document: int) -> int:
    while (above := int(parent[document])) != document:
        parent[document] = parent[above]
        document = above
    return document


def _join(parent: Any, left: int, right: int) -> None:
    """Unite two documents' clusters; the earliest document is the root."""
    left, right = _root(parent, left), _root(parent, right)
    parent[max(left, right)] = min(left, right)


def _save_clusters(work: Work, parent: Any, folder: TaskFolder) -> None:
    """Save ``clusters`` [members, 4] uint64, sorted: a member's digest, its cluster's digest.

    Documents are named by what they say, so that the file fits the corpus however it is cut and
    ordered. The cluster's is that of its first document; that document itself and documents
    without near duplicates are left out. Exact duplicates share a digest.
    """
    rows = [np.empty((0, 4), np.uint64)]
    for unit in range(len(work.units)):
        begin, end = unit_starts(work)[unit : unit + 2].tolist()
        members = np.flatnonzero(parent[begin:end] != np.arange(begin, end)) + begin
        roots = np.array([_root(parent, document) for document in members.tolist()], np.int64)
        digests = (gather_signatures(work, each, "digest") for each in (members, roots))
        rows.append(np.concatenate(list(digests), axis=1))
    clusters = np.concatenate(rows)
    folder.save_array("clusters", clusters[np.lexsort((clusters[:, 1], clusters[:, 0]))])


def _lines_before(work: Work) -> list[dict[str, int]]:
    """Return, for each unit, the line ends of each of its files before its piece."""
    before: dict[str, int] = {}
    lines = []
    for unit in range(len(work.units)):
        ends = work.info("sign", unit)["line_ends"]
        lines.append({source: before.get(source, 0) for source in ends})
        for source, count in ends.items():
            before[source] = before.get(source, 0) + count
    return lines


class CrowdedBuckets:
    """Holds, on disk, which documents stay of each crowded bucket; they are added in order.

    Args:
        work: with its runs of words collected.
        folder: of the task, for temporary maps.
    """

    def __init__(self, work: Work, folder: TaskFolder) -> None:
        """See the class."""
        self._work = work
        self._runs = RunSets(work)
        self._tasks = range(num_candidate_tasks(work))
        sizes = [work.load("candidates", task, CROWDED[2]) for task in self._tasks]
        self._first_bucket = np.cumsum([0, *(len(each) for each in sizes)])
        self._begins = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
        entries = int(self._begins[-1])
        most = min(entries, int(unit_starts(work)[-1]))
        # Of each document that stays, in order: its number and its sketch, which many ask for.
        self._count = 0
        self._documents = folder.new_map("documents", np.int64, most)
        self._sketches = folder.new_map("sketches", np.uint32, most, PERMUTATIONS)
        # Of each bucket: how many stay, and their places among those.
        self._filled = folder.new_map("filled", np.int64, len(self._begins) - 1)
        self._staying = folder.new_map("staying", np.int64, entries)

    def of_unit(self, unit: int) -> tuple[Numbers, Numbers]:
        """Return the unit's documents that are in crowded buckets, and the buckets, by document."""
        begin, end = unit_starts(self._work)[unit : unit + 2]
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
        settings = settings_of(self._work)
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
        return gather_signatures(self._work, np.array([document]), "sketch")[0]

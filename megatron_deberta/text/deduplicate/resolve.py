"""Which documents are kept, and which form a cluster.

In input order, a document is removed if it is the same as, or a near duplicate of, one that is
kept. A cluster holds all documents that a chain of near duplicates connects. Uses memory maps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_deberta.text.deduplicate.candidates import Numbers, num_parts, unit_starts
from megatron_deberta.text.deduplicate.crowded import CrowdedBuckets
from megatron_deberta.text.deduplicate.sign import gather_signatures
from megatron_deberta.text.deduplicate.work import TaskFolder, Work

# Fates of a document.
KEPT, EXACT, NEAR = 0, 1, 2


def resolve(work: Work, task: int, folder: TaskFolder) -> None:
    """Decide on every document whether it is kept.

    Saves ``decision`` [documents] uint8, ``kept`` int64 (for each document that goes, the one that
    stays in its place), ``jaccard`` float64, ``clusters`` (see ``_save_clusters``), and
    ``lines.json``: for each unit, the lines of each file before it.

    Arguments as in ``check_task``.
    """
    starts = unit_starts(work)
    total = max(int(starts[-1]), 1)
    decision = folder.new_map("decision", np.uint8, total)
    kept = folder.new_map("kept", np.int64, total)
    jaccard = folder.new_map("jaccard", np.float64, total)
    parent = folder.new_map("parent", np.int64, total)
    for begin in range(0, total, 1 << 20):
        end = min(begin + (1 << 20), total)
        kept[begin:end] = parent[begin:end] = np.arange(begin, end)
    jaccard[:] = 1.0
    if not work.settings.exact_only:
        _resolve_near(work, starts, folder, parent, decision, kept, jaccard)
    for part in range(num_parts(int(starts[-1]))):
        duplicates = work.load("exact", part, "duplicate")
        firsts = work.load("exact", part, "first")
        # What the first is a near duplicate of, so are its copies.
        decision[duplicates] = np.where(decision[firsts] == KEPT, EXACT, NEAR)
        kept[duplicates] = kept[firsts]
        jaccard[duplicates] = jaccard[firsts]
    _save_clusters(work, starts, parent, folder)
    for name, array in (("decision", decision), ("kept", kept), ("jaccard", jaccard)):
        folder.save_array(name, array)
    folder.save_json("lines", _lines_before(work))


def _resolve_near(
    work: Work,
    starts: Numbers,
    folder: TaskFolder,
    parent: Any,
    decision: Any,
    kept: Any,
    jaccard: Any,
) -> None:
    crowded = CrowdedBuckets(work, starts, folder)
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


def _save_clusters(work: Work, starts: Numbers, parent: Any, folder: TaskFolder) -> None:
    """Save ``clusters`` [members, 4] uint64, sorted: a member's digest, its cluster's digest.

    Documents are named by what they say, so that the file fits the corpus however it is cut and
    ordered. The cluster's is that of its first document; that document itself and documents
    without near duplicates are left out. Exact duplicates share a digest.
    """
    rows = [np.empty((0, 4), np.uint64)]
    for unit in range(len(work.units)):
        begin, end = int(starts[unit]), int(starts[unit + 1])
        members = np.flatnonzero(parent[begin:end] != np.arange(begin, end)) + begin
        roots = np.array([_root(parent, document) for document in members.tolist()], np.int64)
        digests = (gather_signatures(work, starts, each, "digest") for each in (members, roots))
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

"""Pairs of documents: exact duplicates, candidates that share a key, and near duplicates.

The sorted runs of all units are merged one range of keys at a time. Candidates are estimated from
the sketches and then compared exactly, sorted by unit so that files are read once. Memory does not
grow with the corpus. Documents are numbered over the whole input.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_deberta.text.deduplicate.shingles import Hashes, Shingler
from megatron_deberta.text.deduplicate.sign import (
    RANGES,
    gather_signatures,
    map_signature,
    settings_of,
    unit_starts,
)
from megatron_deberta.text.jobs.stages import TaskFolder, Work, load_array

Numbers = npt.NDArray[np.int64]

# Keys that a task holds, about.
PART_DOCUMENTS = 1 << 21
# In a bucket each document is paired with this many before it, and with the bucket's first.
WINDOW = 8
CROWDED = ("crowded_document", "crowded_bucket", "crowded_sizes")
_PAIRS_AT_ONCE = 1 << 15
_PAIRS_WAITING = 1 << 23


def num_parts(documents: int) -> int:
    """Return into how many parts the keys are divided: a power of two, at most 256."""
    parts = 1
    while parts < RANGES and documents > parts * PART_DOCUMENTS:
        parts *= 2
    return parts


def find_exact(work: Work, task: int, folder: TaskFolder) -> None:
    """Find documents that are the same as an earlier one, in one part of the keys.

    ``task`` is the part. Other arguments as in ``check_task``.
    """
    starts = unit_starts(work)
    parts = num_parts(int(starts[-1]))
    keys, rests, documents = [], [], []
    for unit, first in enumerate(starts[:-1]):
        bounds = work.load("sign", unit, "exact_starts")
        columns = [map_signature(work, unit, f"exact_{name}") for name in ("key", "rest")]
        numbers = map_signature(work, unit, "exact_document")
        for part in _slices(bounds, task, parts):
            # Copies: a process may have so many maps only.
            keys.append(np.array(columns[0][part]))
            rests.append(np.array(columns[1][part]))
            documents.append(numbers[part].astype(np.int64) + first)
    key, rest, document = _concatenate(keys), _concatenate(rests), np.concatenate(documents)
    order = np.lexsort((document, rest, key))
    key, rest, document = key[order], rest[order], document[order]
    same = np.zeros(len(key), np.bool_)
    same[1:] = (key[1:] == key[:-1]) & (rest[1:] == rest[:-1])
    first_of = document[_bucket_begins(same)]
    order = np.argsort(document[same], kind="stable")
    folder.save_array("duplicate", document[same][order])
    folder.save_array("first", first_of[same][order])


def mark_exact(work: Work, task: int, folder: TaskFolder) -> None:
    """Write a byte per document: 1 if it is the same as an earlier one.

    Arguments as in ``check_task``.
    """
    parts = range(num_parts(int(unit_starts(work)[-1])))
    _write_flags(work, folder, "exact.raw", [("exact", part, "duplicate") for part in parts])


def _write_flags(
    work: Work, folder: TaskFolder, name: str, arrays: Sequence[tuple[str, int, str]]
) -> None:
    """Write a byte per document: 1 if it is in one of the arrays, of stage, task and name."""
    flags = folder.new_map(name, np.uint8, int(unit_starts(work)[-1]))
    for array in arrays:
        flags[work.load(*array)] = 1
    with folder.open(name) as stream:
        stream.write(flags.data)


def _read_flags(work: Work, stage: str, name: str, unit: int) -> npt.NDArray[np.bool_]:
    """Read what ``_write_flags`` wrote of a unit's documents."""
    begin, end = unit_starts(work)[unit : unit + 2].tolist()
    path = work.task_folder(stage, 0) / name
    return np.fromfile(path, np.uint8, end - begin, offset=begin).astype(np.bool_)


def find_candidates(work: Work, task: int, folder: TaskFolder) -> None:
    """Pair documents that share a band, in one band and part of the keys.

    Saves ``later`` and ``earlier`` of each pair once, sorted, and ``unit_begins``, where the pairs
    with the later document in each unit begin; and of buckets too large for all their pairs
    ``crowded_document`` and ``crowded_bucket`` [entries], sorted by document, and
    ``crowded_sizes`` [buckets].

    ``task`` is the band times the number of parts, plus the part. Other arguments as in
    ``check_task``.
    """
    starts = unit_starts(work)
    parts = num_parts(int(starts[-1]))
    band, part_number = divmod(task, parts)
    keys, documents = [], []
    for unit, first in enumerate(starts[:-1]):
        bounds = work.load("sign", unit, "band_starts")
        if not len(bounds):
            continue
        fresh = ~_read_flags(work, "mark", "exact.raw", unit)
        unit_keys = map_signature(work, unit, "band_key")
        unit_documents = map_signature(work, unit, "band_document")
        for part in _slices(bounds[:, band], part_number, parts):
            local = unit_documents[part]
            wanted = fresh[local]
            keys.append(unit_keys[part][wanted])
            documents.append(local[wanted].astype(np.int64) + first)
    document, begins = sort_buckets(
        _concatenate(keys), np.concatenate([np.empty(0, np.int64), *documents])
    )
    later, earlier = pair_up(document, begins)
    folder.save_array("later", later)
    folder.save_array("earlier", earlier)
    folder.save_array("unit_begins", np.searchsorted(later, starts).astype(np.int64))
    for name, array in zip(CROWDED, crowded_buckets(document, begins), strict=True):
        folder.save_array(name, array)


def sort_buckets(key: Hashes, document: Numbers) -> tuple[Numbers, Numbers]:
    """Sort documents [entries] by key [entries], and by number where keys are equal.

    Returns:
        The documents, bucket after bucket, and the index at which each one's bucket begins.
    """
    order = np.lexsort((document, key))
    key, document = key[order], document[order]
    same = np.zeros(len(key), np.bool_)
    same[1:] = key[1:] == key[:-1]
    return document, _bucket_begins(same)


def crowded_buckets(document: Numbers, begins: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return the buckets of which ``pair_up`` does not make all pairs; see ``sort_buckets``.

    Returns:
        Documents and the numbers of their buckets, from 0, sorted by document; the buckets' sizes.
    """
    sizes = np.bincount(begins, minlength=len(begins))
    which = sizes[begins] > WINDOW + 1
    sizes = sizes[sizes > WINDOW + 1]
    bucket = np.repeat(np.arange(len(sizes)), sizes)
    order = np.argsort(document[which], kind="stable")
    return document[which][order], bucket[order], sizes


def pair_up(document: Numbers, begins: Numbers) -> tuple[Numbers, Numbers]:
    """Pair documents of the same bucket; see ``sort_buckets``.

    All pairs of a bucket would be quadratic in its size. A document is paired with the bucket's
    first and with the ``WINDOW`` before it, so buckets of nine and fewer are complete. In larger
    ones, ``resolve`` compares the documents that would be kept.

    Returns:
        (later, earlier) documents of the pairs, sorted.
    """
    position = np.arange(len(document)) - begins
    later, earlier = [], []
    for distance in range(1, WINDOW + 1):
        which = np.flatnonzero(position >= distance)
        later.append(document[which])
        earlier.append(document[which - distance])
    which = np.flatnonzero(position > WINDOW)
    later.append(document[which])
    earlier.append(document[begins[which]])
    left, right = np.concatenate(later), np.concatenate(earlier)
    order = np.lexsort((right, left))
    return left[order], right[order]


def estimate_pairs(work: Work, task: int, folder: TaskFolder) -> None:
    """Keep the pairs with the later document in a unit and with similar enough sketches.

    Saves ``later`` and ``earlier``, sorted and without repetition.

    Arguments as in ``check_task``.
    """
    starts = unit_starts(work)
    begin, total = int(starts[task]), int(starts[-1])
    waiting = [np.empty(0, np.uint64)]
    for part in range(num_candidate_tasks(work)):
        bounds = work.load("candidates", part, "unit_begins")
        which = slice(bounds[task], bounds[task + 1])
        later = work.load("candidates", part, "later")[which] - begin
        earlier = work.load("candidates", part, "earlier")[which]
        waiting.append(later.astype(np.uint64) * np.uint64(total) + earlier.astype(np.uint64))
        if sum(len(each) for each in waiting) > _PAIRS_WAITING:
            # Near duplicates share most bands; joining now and then bounds the list.
            waiting = [np.unique(np.concatenate(waiting))]
    pairs = np.unique(np.concatenate(waiting))
    later = (pairs // np.uint64(max(total, 1))).astype(np.int64) + begin
    earlier = (pairs % np.uint64(max(total, 1))).astype(np.int64)
    alike = _estimates(work, later, earlier) >= settings_of(work).least_estimate
    folder.save_array("later", later[alike])
    folder.save_array("earlier", earlier[alike])


def num_candidate_tasks(work: Work) -> int:
    """Return the number of tasks of the stage that finds candidates."""
    return settings_of(work).bands * num_parts(int(unit_starts(work)[-1]))


def mark_needed(work: Work, task: int, folder: TaskFolder) -> None:
    """Write a byte per document: 1 if its runs of words are needed.

    Arguments as in ``check_task``.
    """
    arrays = [
        ("estimate", unit, name) for unit in range(len(work.units)) for name in ("later", "earlier")
    ]
    # Which of the crowded ones ``resolve`` compares depends on what stays.
    parts = range(num_candidate_tasks(work))
    arrays += [("candidates", part, "crowded_document") for part in parts]
    _write_flags(work, folder, "needed.raw", arrays)


def collect_runs(work: Work, task: int, folder: TaskFolder) -> None:
    """Read a unit again and write the sets of runs of the documents that are needed.

    ``runs.raw`` holds them as sorted uint64, ``bounds`` [needed + 1] says where each begins, and
    ``document`` [needed] whose they are.

    Arguments as in ``check_task``.
    """
    needed = _read_flags(work, "needed", "needed.raw", task)
    sizes = [0]
    with folder.open("runs.raw") as stream:
        if needed.any():
            shingler = Shingler(settings_of(work).ngram)
            for number, record in enumerate(work.read(task, folder)):
                if needed[number]:
                    runs = np.unique(shingler(record.text)[1])
                    stream.write(runs.tobytes())
                    sizes.append(runs.size)
    folder.save_array("document", np.flatnonzero(needed) + unit_starts(work)[task])
    folder.save_array("bounds", np.cumsum(sizes, dtype=np.int64))


def verify_pairs(work: Work, task: int, folder: TaskFolder) -> None:
    """Compute the Jaccard similarity of a unit's pairs and keep those at the threshold or above.

    Saves ``later``, ``earlier`` and ``jaccard`` (float64), sorted.

    Arguments as in ``check_task``.
    """
    later, earlier = (work.load("estimate", task, name) for name in ("later", "earlier"))
    runs = RunSets(work)
    jaccard = np.zeros(len(later))
    for number, (left, right) in enumerate(zip(later.tolist(), earlier.tolist(), strict=True)):
        jaccard[number] = jaccard_of(runs.of(left), runs.of(right))
    similar = jaccard >= settings_of(work).threshold
    for name, array in (("later", later), ("earlier", earlier), ("jaccard", jaccard)):
        folder.save_array(name, array[similar])


def jaccard_of(left: Hashes, right: Hashes) -> float:
    """Return the Jaccard similarity of two sets, given as sorted arrays without repetition."""
    together = np.intersect1d(left, right, assume_unique=True).size
    return together / (left.size + right.size - together)


class RunSets:
    """Looks up documents' sets of runs; the last few stay in memory.

    Args:
        work: with its runs of words collected.
    """

    def __init__(self, work: Work) -> None:
        """See the class."""
        self._work = work
        self._unit = lru_cache(maxsize=64)(self._open_unit)
        self.of = lru_cache(maxsize=64)(self._read)

    def _open_unit(self, unit: int) -> tuple[Path, Numbers, Numbers]:
        folder = self._work.task_folder("collect", unit)
        document, bounds = (load_array(folder / f"{name}.npy") for name in ("document", "bounds"))
        return folder / "runs.raw", document, bounds

    def _read(self, document: int) -> Hashes:
        unit = int(np.searchsorted(unit_starts(self._work), document, side="right")) - 1
        path, documents, bounds = self._unit(unit)
        place = int(np.searchsorted(documents, document))
        begin, end = bounds[place : place + 2].tolist()
        # Not mapped: what was read of a map would stay in memory.
        return np.fromfile(path, np.uint64, end - begin, offset=8 * begin)


def _estimates(work: Work, later: Numbers, earlier: Numbers) -> npt.NDArray[np.float64]:
    """Return the share of equal sketch values of each pair."""
    estimates = np.empty(len(later))
    # By the earlier document, so that a piece of the list needs few units.
    order = np.argsort(earlier, kind="stable")
    for begin in range(0, len(order), _PAIRS_AT_ONCE):
        part = order[begin : begin + _PAIRS_AT_ONCE]
        left = gather_signatures(work, later[part], "sketch")
        right = gather_signatures(work, earlier[part], "sketch")
        estimates[part] = (left == right).mean(axis=1)
    return estimates


def _slices(bounds: Numbers, part: int, parts: int) -> list[slice]:
    """Return, for each run, where the keys of a part are; ``bounds`` is [runs, ranges + 1]."""
    width = RANGES // parts
    return [slice(run[part * width], run[(part + 1) * width]) for run in bounds]


def _bucket_begins(same: npt.NDArray[np.bool_]) -> Numbers:
    """Return where each entry's bucket begins; ``same`` tells that an entry continues one."""
    begins: Numbers = np.maximum.accumulate(np.where(same, 0, np.arange(len(same))))
    return begins


def _concatenate(arrays: list[Hashes]) -> Hashes:
    return np.concatenate([np.empty(0, np.uint64), *arrays])

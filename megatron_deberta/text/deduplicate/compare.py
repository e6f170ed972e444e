"""Near duplicates among the candidates: estimated from the sketches, then compared exactly.

Pairs are sorted by unit, so that files are read once and memory does not grow with the corpus.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_deberta.text.deduplicate.candidates import Numbers, num_parts, unit_starts
from megatron_deberta.text.deduplicate.shingles import Hashes, Shingler
from megatron_deberta.text.deduplicate.sign import gather_signatures
from megatron_deberta.text.deduplicate.units import Record, UnitReader
from megatron_deberta.text.deduplicate.work import TaskFolder, Work, load_array

_PAIRS_AT_ONCE = 1 << 15
_PAIRS_WAITING = 1 << 23


def estimate_pairs(work: Work, task: int, folder: TaskFolder) -> None:
    """Keep the pairs with the later document in a unit and with similar enough sketches.

    Saves ``later`` and ``earlier``, sorted and without repetition.

    Arguments as in ``check_task``.
    """
    starts = unit_starts(work)
    begin, total = int(starts[task]), int(starts[-1])
    waiting = [np.empty(0, np.uint64)]
    for part in range(num_candidate_tasks(work, total)):
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
    alike = _estimates(work, starts, later, earlier) >= work.settings.least_estimate
    folder.save_array("later", later[alike])
    folder.save_array("earlier", earlier[alike])


def num_candidate_tasks(work: Work, total: int) -> int:
    """Return the number of tasks of the stage that finds candidates."""
    return work.settings.bands * num_parts(total)


def mark_needed(work: Work, task: int, folder: TaskFolder) -> None:
    """Write a byte per document: 1 if its runs of words are needed.

    Arguments as in ``check_task``.
    """
    total = int(unit_starts(work)[-1])
    flags = folder.new_map("needed", np.uint8, total)
    for unit in range(len(work.units)):
        for name in ("later", "earlier"):
            flags[work.load("estimate", unit, name)] = 1
    for part in range(num_candidate_tasks(work, total)):
        # Which of them ``resolve`` compares depends on what stays.
        flags[work.load("candidates", part, "crowded_document")] = 1
    with folder.open("needed.raw") as stream:
        stream.write(flags.data)


def collect_runs(work: Work, task: int, folder: TaskFolder) -> None:
    """Read a unit again and write the sets of runs of the documents that are needed.

    ``runs.raw`` holds them as sorted uint64, ``bounds`` [needed + 1] says where each begins, and
    ``document`` [needed] whose they are.

    Arguments as in ``check_task``.
    """
    starts = unit_starts(work)
    begin, end = int(starts[task]), int(starts[task + 1])
    path = work.task_folder("needed", 0) / "needed.raw"
    needed = np.fromfile(path, np.uint8, end - begin, offset=begin)
    sizes = [0]
    with folder.open("runs.raw") as stream:
        if needed.any():
            shingler = Shingler(work.settings.ngram)
            number = 0
            reader = UnitReader(work.units[task], work.sources, work.options)
            for record in reader:
                if not isinstance(record, Record):
                    continue
                if needed[number]:
                    runs = np.unique(shingler(record.text)[1])
                    stream.write(runs.tobytes())
                    sizes.append(runs.size)
                number += 1
            folder.counts = reader.counts
    folder.save_array("document", np.flatnonzero(needed).astype(np.int64) + begin)
    folder.save_array("bounds", np.cumsum(sizes, dtype=np.int64))


def verify_pairs(work: Work, task: int, folder: TaskFolder) -> None:
    """Compute the Jaccard similarity of a unit's pairs and keep those at the threshold or above.

    Saves ``later``, ``earlier`` and ``jaccard`` (float64), sorted.

    Arguments as in ``check_task``.
    """
    starts = unit_starts(work)
    later, earlier = (work.load("estimate", task, name) for name in ("later", "earlier"))
    runs = RunSets(work, starts)
    jaccard = np.zeros(len(later))
    for number, (left, right) in enumerate(zip(later.tolist(), earlier.tolist(), strict=True)):
        jaccard[number] = jaccard_of(runs.of(left), runs.of(right))
    similar = jaccard >= work.settings.threshold
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
        starts: see ``unit_starts``.
    """

    def __init__(self, work: Work, starts: Numbers) -> None:
        """See the class."""
        self._work = work
        self._starts = starts
        self._unit = lru_cache(maxsize=64)(self._open_unit)
        self.of = lru_cache(maxsize=64)(self._read)

    def _open_unit(self, unit: int) -> tuple[Path, Numbers, Numbers]:
        folder = self._work.task_folder("collect", unit)
        document, bounds = (load_array(folder / f"{name}.npy") for name in ("document", "bounds"))
        return folder / "runs.raw", document, bounds

    def _read(self, document: int) -> Hashes:
        unit = int(np.searchsorted(self._starts, document, side="right")) - 1
        path, documents, bounds = self._unit(unit)
        place = int(np.searchsorted(documents, document))
        begin, end = bounds[place : place + 2].tolist()
        # Not mapped: what was read of a map would stay in memory.
        return np.fromfile(path, np.uint64, end - begin, offset=8 * begin)


def _estimates(
    work: Work, starts: Numbers, later: Numbers, earlier: Numbers
) -> npt.NDArray[np.float64]:
    """Return the share of equal sketch values of each pair."""
    estimates = np.empty(len(later))
    # By the earlier document, so that a piece of the list needs few units.
    order = np.argsort(earlier, kind="stable")
    for begin in range(0, len(order), _PAIRS_AT_ONCE):
        part = order[begin : begin + _PAIRS_AT_ONCE]
        left = gather_signatures(work, starts, later[part], "sketch")
        right = gather_signatures(work, starts, earlier[part], "sketch")
        estimates[part] = (left == right).mean(axis=1)
    return estimates

"""Best-fit-decreasing packing: short documents share rows without being cut.

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv:2404.10830,
section 3.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from megatron_deberta.data import Integers
from megatron_deberta.data.dataset.corpus import Corpus
from megatron_deberta.data.dataset.index_cache import IndexCache, LatestTwo, Parts
from megatron_deberta.data.dataset.rows import RowPacking, TokenSpans
from megatron_deberta.data.randomness import Purpose, keyed_generator


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


class BestFit(RowPacking):
    """Rows of whole documents; of a longer one, its last part shares a row.

    Documents of the same length change places in every epoch; the number of rows does not depend
    on the epoch.
    """

    def __init__(self, corpus: Corpus, content_length: int, key: int, cache: IndexCache) -> None:
        self._corpus = corpus
        self._content_length = content_length
        self._key = key
        self._cache = cache
        # A row of [CLS], then parts with a [SEP] each.
        self._capacity = content_length + 1
        chunks = corpus.lengths.astype(np.int64) // content_length
        self._chunk_ends = np.cumsum(chunks, dtype=np.int64)
        self._num_whole = int(self._chunk_ends[-1])
        self._rest_of = LatestTwo(self._read_rest)
        self.index_entries = len(corpus)
        self.num_rows = self._num_whole + self._rest_of(0)[1].size

    def spans(self, epoch: int, rows: Integers) -> TokenSpans:
        """Return the token spans of the given rows of an epoch."""
        documents, ends = self._rest_of(epoch)
        is_whole = rows < self._num_whole
        places = np.where(is_whole, 0, rows - self._num_whole)
        begins = np.where(places > 0, ends[places - 1], 0) if ends.size else places
        counts = np.where(is_whole, 1, ends[places] - begins) if ends.size else np.ones_like(rows)
        row_of = np.repeat(np.arange(rows.size), counts)
        offsets = np.arange(row_of.size) - np.repeat(np.cumsum(counts) - counts, counts)
        chosen = np.searchsorted(self._chunk_ends, np.minimum(rows, self._num_whole - 1), "right")
        numbers = chosen[row_of]
        in_rest = ~is_whole[row_of]
        numbers[in_rest] = documents[begins[row_of[in_rest]] + offsets[in_rest]]
        lengths = self._corpus.lengths[numbers].astype(np.int64)
        chunks = lengths // self._content_length
        before = rows[row_of] - (self._chunk_ends[numbers] - chunks)
        skipped = np.where(in_rest, chunks, before) * self._content_length
        taken = np.where(in_rest, lengths - skipped, self._content_length)
        return TokenSpans(counts, self._corpus.starts(numbers) + skipped, taken)

    def _read_rest(self, epoch: int) -> tuple[Integers, Integers]:
        """Return the documents whose last parts share rows, row by row, and the rows' ends."""
        identity = [self._corpus.identity, self._content_length, self._key, epoch]
        size = len(self._corpus)
        arrays = self._cache.get("best_fit", identity, size, lambda: self._pack(epoch))
        return arrays["documents"], arrays["ends"]

    def _pack(self, epoch: int) -> Parts:
        lengths = self._corpus.lengths.astype(np.int64) % self._content_length
        order = keyed_generator(self._key, Purpose.DOCUMENT_ORDER, epoch).permutation(lengths.size)
        order = order[lengths[order] > 0]
        order = order[np.argsort(-lengths[order], kind="stable")]
        bins, num_bins = best_fit(lengths[order] + 1, self._capacity)
        yield "documents", order[np.argsort(bins, kind="stable")].astype(np.int64)
        yield "ends", np.cumsum(np.bincount(bins, minlength=num_bins), dtype=np.int64)

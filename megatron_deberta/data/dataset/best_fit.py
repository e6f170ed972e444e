"""Best-fit-decreasing packing: short documents share rows without being cut.

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv:2404.10830,
section 3.
"""

from __future__ import annotations

import numpy as np

from megatron_deberta.data.arrays import Integers
from megatron_deberta.data.bin_packing import best_fit
from megatron_deberta.data.dataset.corpus import Corpus
from megatron_deberta.data.dataset.index_cache import IndexCache, LatestTwo, Parts
from megatron_deberta.data.dataset.rows import TokenSpans
from megatron_deberta.data.randomness import Purpose, keyed_generator


class BestFit:
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

    def epoch_rows(self, epoch: int) -> int:
        """Return the number of rows of an epoch."""
        return self.num_rows

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

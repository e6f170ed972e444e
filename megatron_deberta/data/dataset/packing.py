"""Packing of documents into rows of a fixed length, as a pure function of (seed, row index).

The random order of documents is drawn anew in each epoch, and so is the order of rows, which
separates neighbouring rows of a long document.

Source: Liu et al. 2019 (RoBERTa), arXiv:1907.11692, section 4.2. Deviation: rows are cut at token
boundaries, not at sentence ends, as in the released DeBERTa data, so no row is padded.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from megatron_deberta.data import Integers
from megatron_deberta.data.dataset.best_fit import BestFit
from megatron_deberta.data.dataset.corpus import Corpus
from megatron_deberta.data.dataset.index_cache import IndexCache, LatestTwo, Parts
from megatron_deberta.data.dataset.pairs import Pairs
from megatron_deberta.data.dataset.rows import (
    RowBatch,
    RowPacking,
    TokenSpans,
    assemble,
    read_groups,
)
from megatron_deberta.data.randomness import (
    KeyedPermutation,
    Purpose,
    hash_values,
    keyed_generator,
    mix64,
)
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.errors import DataError

# Formats of segment pairs -> maximum number of sentences per pair, 0: as many as fit.
PAIR_PACKINGS = {"segment_pair": 0, "sentence_pair": 2}
# [CLS] and the final [SEP].
_FRAME_TOKENS = 2
_CHUNK = 1 << 22


class _FullSentences(RowPacking):
    """Rows cut from the concatenated documents of an epoch, with separators between them."""

    def __init__(self, corpus: Corpus, content_length: int, key: int, cache: IndexCache) -> None:
        self._corpus = corpus
        self._content_length = content_length
        self._key = key
        self._cache = cache
        self._stream_length = corpus.num_tokens + len(corpus) - 1
        self.num_rows = -(-self._stream_length // content_length)
        self.index_entries = len(corpus)
        self._order_of = LatestTwo(self._read_order)

    def _read_order(self, epoch: int) -> tuple[Integers, Integers]:
        """Return an epoch's document order and the documents' cumulative ends with separators."""
        identity = [self._corpus.identity, self._key, epoch]
        size = len(self._corpus)
        arrays = self._cache.get("order", identity, size, lambda: self._draw_order(epoch))
        return arrays["order"], arrays["ends"]

    def _draw_order(self, epoch: int) -> Parts:
        generator = keyed_generator(self._key, Purpose.DOCUMENT_ORDER, epoch)
        order = generator.permutation(len(self._corpus))
        narrow = np.uint32 if len(self._corpus) <= 1 << 32 else np.int64
        total = 0
        for begin in range(0, order.size, _CHUNK):
            part = order[begin : begin + _CHUNK]
            ends = total + np.cumsum(self._corpus.lengths[part] + 1, dtype=np.int64)
            yield "order", part.astype(narrow)
            yield "ends", ends
            total = int(ends[-1])

    def spans(self, epoch: int, rows: Integers) -> TokenSpans:
        order, ends = self._order_of(epoch)
        begins = rows * self._content_length
        stops = np.minimum(begins + self._content_length, self._stream_length)
        first = np.searchsorted(ends, begins, side="right")
        counts = np.searchsorted(ends, stops - 1, side="right") - first + 1
        row_of = np.repeat(np.arange(rows.size), counts)
        before = np.cumsum(counts) - counts
        places = (first - before)[row_of] + np.arange(row_of.size)
        documents = order[places]
        lengths = self._corpus.lengths[documents].astype(np.int64)
        document_begins = ends[places] - 1 - lengths
        skipped = np.maximum(begins[row_of] - document_begins, 0)
        taken = np.minimum(stops[row_of] - document_begins, lengths) - skipped
        starts = self._corpus.starts(documents) + skipped
        # Drop a document of which only the separator falls into the row, at its start.
        empty = before[taken[before] == 0]
        if empty.size:
            counts[row_of[empty]] -= 1
            starts, taken = np.delete(starts, empty), np.delete(taken, empty)
        return TokenSpans(counts, starts, taken)


class _DocSentences(RowPacking):
    """Rows that end with their document; a long document fills several rows."""

    def __init__(self, corpus: Corpus, content_length: int, cache: IndexCache) -> None:
        self._corpus = corpus
        self._content_length = content_length
        self._row_ends = cache.get(
            "rows", [corpus.identity, content_length], len(corpus), self._count_rows
        )["ends"]
        self.num_rows = int(self._row_ends[-1])
        # The rows' ends are those of every epoch.
        self.index_entries = 0

    def _count_rows(self) -> Parts:
        total = 0
        for begin in range(0, len(self._corpus), _CHUNK):
            lengths = self._corpus.lengths[begin : begin + _CHUNK].astype(np.int64)
            ends = total + np.cumsum(-(-lengths // self._content_length), dtype=np.int64)
            yield "ends", ends
            total = int(ends[-1])

    def spans(self, epoch: int, rows: Integers) -> TokenSpans:
        documents = np.searchsorted(self._row_ends, rows, side="right")
        lengths = self._corpus.lengths[documents].astype(np.int64)
        rows_left = self._row_ends[documents] - rows
        skipped = (-(-lengths // self._content_length) - rows_left) * self._content_length
        taken = np.minimum(self._content_length, lengths - skipped)
        starts = self._corpus.starts(documents) + skipped
        return TokenSpans(np.ones(rows.size, np.int64), starts, taken)


class PackedRows:
    """Endless rows of a corpus, epoch after epoch.

    Args:
        corpus: the documents.
        vocabulary: special ids and size.
        sequence_length: N, maximum tokens per row.
        packing: as ``data.packing``.
        key: key of the order, from the run's seed and the component's number.
        static_masks: number of masks per row; 0: a new mask for each sample. Otherwise all epochs
            have the same rows, and epoch e the masks of epoch e modulo this number.
        cache: of indices.

    Attributes:
        rows_per_epoch: the same for every epoch.
        index_entries: documents or sentences in an epoch's index; 0: epochs have none.
        identity: equal for rows with the same indices.

    Raises:
        DataError: ``sequence_length`` leaves no room for text, or the format needs sentences and
            there are none.
    """

    def __init__(
        self,
        corpus: Corpus,
        vocabulary: Vocabulary,
        sequence_length: int,
        packing: str,
        key: int,
        static_masks: int = 0,
        cache: IndexCache | None = None,
    ) -> None:
        """See the class."""
        cache = cache or IndexCache()
        content_length = sequence_length - _FRAME_TOKENS
        if content_length < 2:
            raise DataError(f"data.sequence_length is {sequence_length}; it must be at least 4")
        self._corpus = corpus
        self._vocabulary = vocabulary
        self._key = key
        self._static_masks = static_masks
        self._packing: RowPacking
        if packing in PAIR_PACKINGS:
            most = PAIR_PACKINGS[packing]
            self._packing = Pairs(corpus, content_length - 1, most, key, cache)
        elif packing == "best_fit":
            self._packing = BestFit(corpus, content_length, key, cache)
        elif packing == "full_sentences":
            self._packing = _FullSentences(corpus, content_length, key, cache)
        else:
            self._packing = _DocSentences(corpus, content_length, cache)
        self.rows_per_epoch = self._packing.num_rows
        self.index_entries = self._packing.index_entries
        self.identity = json.dumps([corpus.identity, key, sequence_length, packing])
        self._row_order = LatestTwo(self._draw_row_order)

    def rows(self, indices: Integers) -> RowBatch:
        """Return the rows of the given indices >= 0, in that order.

        Raises:
            DataError: the shard holds an id outside the vocabulary.
        """
        epochs, numbers = np.divmod(indices, self.rows_per_epoch)
        return read_groups(epochs, lambda epoch, at: self._epoch_rows(epoch, numbers[at]))

    def index_epoch(self, epoch: int) -> int:
        """Return the epoch whose index an epoch uses."""
        return 0 if self._static_masks else epoch

    def build_index(self, epoch: int) -> None:
        """Build the index of ``index_epoch(epoch)`` unless the cache has it."""
        self._packing.spans(self.index_epoch(epoch), np.zeros(1, np.int64))

    def _epoch_rows(self, epoch: int, numbers: Integers) -> RowBatch:
        cut = self.index_epoch(epoch)
        available = self._packing.epoch_rows(cut)
        permute = self._row_order(epoch)
        chosen = np.array([permute(number % available) for number in numbers.tolist()])
        rows = assemble(self._corpus, self._vocabulary, self._packing.spans(cut, chosen))
        if not self._static_masks:
            return rows
        key = mix64(self._key, Purpose.STATIC_MASK, epoch % self._static_masks)
        return replace(rows, mask_ids=hash_values(key, chosen))

    def _draw_row_order(self, epoch: int) -> KeyedPermutation:
        num_rows = self._packing.epoch_rows(self.index_epoch(epoch))
        return KeyedPermutation(num_rows, mix64(self._key, Purpose.ROW_ORDER, epoch))

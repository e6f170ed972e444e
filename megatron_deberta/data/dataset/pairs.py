"""Segment pairs for next-sentence prediction.

A chunk of sentences is split in two. With p = 1/2 the second half is replaced by text of another
document, and its own sentences begin the next chunk, so none is lost. A document's last sentence,
alone in its chunk, is always paired with another document. Each epoch is cut anew, without a
generator: each draw is a hash of the sentence that a chunk begins with.

Source: Devlin et al. 2019 (BERT), ``create_pretraining_data.py``; Liu et al. 2019 (RoBERTa),
arXiv:1907.11692, section 4.2. Deviations: a chunk ends before the sentence that does not fit, where
BERT takes it and truncates; no randomly shortened sequences, as in RoBERTa.
"""

from __future__ import annotations

import numpy as np

from megatron_deberta.data import Bits, Integers
from megatron_deberta.data.dataset.corpus import Corpus
from megatron_deberta.data.dataset.index_cache import IndexCache, LatestTwo, Parts
from megatron_deberta.data.dataset.rows import RowPacking, TokenSpans
from megatron_deberta.data.randomness import Purpose, draws, hash_values, mix64
from megatron_deberta.errors import DataError

_DOCUMENTS_AT_ONCE = 1 << 18


class Pairs(RowPacking):
    """Rows of two segments.

    Args:
        corpus: documents of sentences.
        text_length: maximum tokens of both segments.
        max_sentences: maximum sentences per pair; 0: as many as fit.
        key: key of the order.
        cache: of indices.

    Attributes:
        num_rows: rows per epoch. Epochs are cut differently; a longer one omits some of its rows,
            a shorter one repeats some.

    Raises:
        DataError: the shards hold no sentences, or only one document.
    """

    def __init__(
        self, corpus: Corpus, text_length: int, max_sentences: int, key: int, cache: IndexCache
    ) -> None:
        """See the class."""
        self._corpus = corpus
        self._text_length = text_length
        self._max_sentences = max_sentences
        self._key = key
        self._cache = cache
        if len(corpus) < 2:
            raise DataError(
                f"{corpus.name}: data.packing of pairs takes second segments from other documents, "
                "but there is only one; add text or use data.packing=full_sentences"
            )
        sentences = corpus.sentences(cache)
        self._ends = sentences.ends
        self._bounds = sentences.bounds
        if all(shard.num_sequences == len(shard) for shard in corpus.shards):
            raise DataError(
                f"{corpus.name}: data.packing of pairs needs sentences, but each document is one "
                "sequence; preprocess with sentence splitting, or use data.packing=full_sentences"
            )
        self._pairs = LatestTwo(self._read_pairs)
        self.index_entries = self._ends.size
        self.num_rows = self.epoch_rows(0)

    def epoch_rows(self, epoch: int) -> int:
        """Return the number of pairs of an epoch."""
        return int(self._pairs(epoch)["begins"].size)

    def spans(self, epoch: int, rows: Integers) -> TokenSpans:
        """Return both segments of the given rows of an epoch."""
        index = self._pairs(epoch)
        begins = index["begins"][rows]
        splits = begins + index["firsts"][rows]
        stops = splits + index["seconds"][rows]
        documents = self._bounds.searchsorted(begins, side="right") - 1
        is_random = stops == splits
        first_lengths = self._ends[splits] - self._ends[begins]
        second_begins, second_stops = splits.copy(), stops.copy()
        partners = documents.copy()
        # Draws per row: document and sentence of a random segment, and truncation.
        key = mix64(self._key, Purpose.PAIR_PARTNER, epoch)
        random_bits = draws(hash_values(key, rows), np.full(rows.size, 3), 0).reshape(-1, 3)
        if is_random.any():
            chosen = self._random_segments(
                documents[is_random], random_bits[is_random], first_lengths[is_random]
            )
            partners[is_random], second_begins[is_random], second_stops[is_random] = chosen
        second_lengths = self._ends[second_stops] - self._ends[second_begins]
        starts = np.stack(
            [self._locate(documents, begins), self._locate(partners, second_begins)], axis=1
        )
        lengths = np.stack([first_lengths, second_lengths], axis=1)
        _cut_to_length(starts, lengths, self._text_length, random_bits[:, 2])
        counts = np.full(rows.size, 2)
        return TokenSpans(counts, starts.ravel(), lengths.ravel(), is_random.astype(np.int64))

    def _random_segments(
        self, documents: Integers, random_bits: Bits, used_tokens: Integers
    ) -> tuple[Integers, Integers, Integers]:
        """Draw second segments: another document, and sentences [begin, stop) of it that fit."""
        others = _below(random_bits[:, 0], np.full(documents.size, len(self._corpus) - 1))
        others += others >= documents
        first, last = self._bounds[others], self._bounds[others + 1]
        begins = first + _below(random_bits[:, 1], last - first)
        return others, begins, self._fitting(begins, last, self._text_length - used_tokens, 1)

    def _fitting(
        self, begins: Integers, last: Integers, room: Integers | int, least: int
    ) -> Integers:
        """Return the end of the longest run of sentences that fits, at least ``least`` of them."""
        limits = self._ends[begins] + room
        stops = self._ends.searchsorted(limits, side="right") - 1
        most = begins + (self._max_sentences - 2 + least if self._max_sentences else 1 << 40)
        return np.minimum(np.clip(stops, begins + least, most), last)

    def _locate(self, documents: Integers, sentences: Integers) -> Integers:
        """Return the first tokens of sentences, for ``Corpus.tokens``."""
        inside: Integers = self._ends[sentences] - self._ends[self._bounds[documents]]
        begins: Integers = self._corpus.starts(documents) + inside
        return begins

    def _read_pairs(self, epoch: int) -> dict[str, Integers]:
        options = [self._text_length, self._max_sentences, self._key, epoch]
        identity = [self._corpus.identity, *options]
        return self._cache.get("pairs", identity, self._ends.size, lambda: self._cut(epoch))

    def _cut(self, epoch: int) -> Parts:
        """Cut all documents; each round takes one chunk of every document that is not finished."""
        key = mix64(self._key, Purpose.PAIR_CUT, epoch)
        for low in range(0, len(self._corpus), _DOCUMENTS_AT_ONCE):
            bounds = np.asarray(self._bounds[low : low + _DOCUMENTS_AT_ONCE + 1])
            begins, last = bounds[:-1], bounds[1:]
            rounds = []
            while begins.size:
                stops = self._fitting(begins, last, self._text_length, 2)
                random_bits = hash_values(key, begins)
                alone = stops - begins == 1
                is_random = alone | (random_bits >> np.uint64(63)).astype(np.bool_)
                splits = begins + 1 + _below(random_bits << np.uint64(1), stops - begins - 1)
                seconds = np.where(is_random, 0, stops - splits)
                rounds.append((begins, splits - begins, seconds))
                begins = np.where(is_random, splits, stops)
                left = begins < last
                begins, last = begins[left], last[left]
            columns = [np.concatenate(column) for column in zip(*rounds, strict=True)]
            order = np.argsort(columns[0])
            # Sentences of each segment; 0: a random second segment.
            yield "begins", columns[0][order]
            yield "firsts", columns[1][order].astype(np.uint32)
            yield "seconds", columns[2][order].astype(np.uint32)


def _below(random_bits: Bits, bounds: Integers) -> Integers:
    """Map the upper 32 bits of draws to [0, bound), or 0 where the bound is 0."""
    scaled = (random_bits >> np.uint64(32)) * bounds.astype(np.uint64) >> np.uint64(32)
    numbers: Integers = scaled.astype(np.int64)
    return numbers


def _cut_to_length(
    starts: Integers, lengths: Integers, text_length: int, random_bits: Bits
) -> None:
    """Truncate pairs ``[B, 2]`` that are too long, in place: the longer segment, at both ends."""
    excess = lengths.sum(axis=1) - text_length
    for row in np.flatnonzero(excess > 0).tolist():
        half = text_length // 2
        shorter = min(int(lengths[row].min()), half)
        longer = int(np.argmax(lengths[row]))
        kept = np.full(2, shorter)
        kept[longer] = text_length - shorter
        cut = lengths[row] - kept
        # A random number of the excess tokens is removed at the front, the others at the end.
        starts[row] += _below(random_bits[row : row + 1], cut + 1)
        lengths[row] = kept

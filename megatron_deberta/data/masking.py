"""Masked-token selection and replacement as a pure function of (seed, sample index).

All rows of a batch are masked at once, in arrays of tokens, words and spans laid end to end.

``microsoft`` is Microsoft's NGramMaskGenerator: one n-gram in each window of n * int(1/p) words,
left to right, until round(p * length) tokens are taken, so the end of a row has fewer masks; a
single punctuation mark is a word of its own, and random tokens come from the whole vocabulary.
``uniform`` cuts the row into spans with the same length distribution and takes spans in random
order until exactly that many tokens are masked, so every position is equally likely; the last span
loses the pieces beyond the budget (possibly within a word), and random tokens are never special.

Source: He et al. 2021, arXiv:2006.03654, section 5.1.1 (15 %, spans up to three tokens);
microsoft/DeBERTa ``DeBERTa/apps/tasks/mlm_task.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_deberta.config.schema import ObjectiveConfig
from megatron_deberta.data import Bits, Booleans, Integers
from megatron_deberta.data.randomness import Purpose, draws, hash_values, mix64
from megatron_deberta.data.vocabulary import Vocabulary

# Extra slots in ``microsoft`` mode, whose last word may exceed the budget; longer ones are cut.
_MICROSOFT_SLACK = 8
# Tokens masked together; chosen so that the intermediate arrays fit the processor's cache.
_TOKENS_AT_ONCE = 1 << 16
_SPAN_BITS, _ORDER_BITS = 20, 24
# Streams of draws: spans, and replacement tokens.
_WORDS, _TARGETS = 0, 1


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows after masking, laid end to end.

    Attributes:
        tokens: [T] int64, masked.
        positions: [m] int64 indices into ``tokens`` of those to predict, ascending.
        labels: [m] int64, the original tokens there.
        counts: [B] int64 tokens to predict in each row.
    """

    tokens: Integers
    positions: Integers
    labels: Integers
    counts: Integers


class _Words:
    """Candidates for masking (tokens that are not special) of some rows, and their words.

    Attributes:
        candidates: [C] their indices among the tokens.
        bounds: [B + 1] candidates before each row, then their number.
        firsts: [W] the first candidate of each word.
        word_bounds: [B + 1] words before each row, then their number.
        counts: [B] words of each row.
    """

    def __init__(
        self, tokens: Integers, ends: Integers, vocabulary: Vocabulary, whole: bool, released: bool
    ) -> None:
        self.candidates = np.flatnonzero(~vocabulary.is_special[tokens])
        self.bounds = np.concatenate([[0], self.candidates.searchsorted(ends)])
        if whole:
            ids = tokens[self.candidates]
            begins = vocabulary.word_starts[ids]
            begins[self.bounds[:-1][self.bounds[1:] > self.bounds[:-1]]] = True
            if not released:
                # A word ends at a special token; in Microsoft's code it does not.
                begins[1:] |= np.diff(self.candidates) > 1
            elif vocabulary.single_marks is not None:
                begins |= vocabulary.single_marks[ids]
            self.firsts = begins.nonzero()[0]
            self.word_bounds = self.firsts.searchsorted(self.bounds)
        else:
            self.firsts, self.word_bounds = np.arange(self.candidates.size), self.bounds
        self.counts = self.word_bounds[1:] - self.word_bounds[:-1]


class Masker:
    """Masks rows as the objective configures it.

    Args:
        objective: probabilities, span length and mode.
        vocabulary: special ids and word starts.
        sequence_length: N.
        seed: of the run.
        purpose: training or validation masks.

    Attributes:
        max_targets: M, the maximum number of masked positions per row; shapes are static.
    """

    def __init__(
        self,
        objective: ObjectiveConfig,
        vocabulary: Vocabulary,
        sequence_length: int,
        seed: int,
        purpose: Purpose,
    ) -> None:
        """See the class."""
        self._objective = objective
        self._vocabulary = vocabulary
        self._key = mix64(seed, purpose)
        shares = 1.0 / np.arange(1, objective.max_span_words + 1)
        bounds = np.cumsum(shares / shares.sum())[:-1]
        self._span_bounds = [np.uint64(int(bound * 2.0**64)) for bound in bounds]
        self._microsoft = objective.masking == "microsoft"
        slack = _MICROSOFT_SLACK if self._microsoft else 0
        most = int(self._budgets(np.array([sequence_length]))[0])
        self.max_targets = min(most + slack, sequence_length)

    def __call__(
        self, tokens: Integers, sizes: Integers, mask_ids: npt.NDArray[np.integer]
    ) -> MaskedRows:
        """Mask rows.

        Args:
            tokens: [T] int64 ids inside the vocabulary, row after row; not changed.
            sizes: [B] tokens of each row, from 1 to N.
            mask_ids: [B] key of each row's mask: the global sample index, or an id shared by rows
                that get the same mask.

        Returns:
            The masked rows; [CLS], [SEP] and other special tokens are never chosen.
        """
        keys = hash_values(self._key, mask_ids)
        masked, positions, counts = tokens.copy(), [], []
        for rows, begin, end in _groups(sizes):
            chosen, per_row = self._choose(tokens[begin:end], sizes[rows], keys[rows])
            positions.append(begin + chosen)
            counts.append(per_row)
        places, totals = np.concatenate(positions), np.concatenate(counts)
        labels = tokens[places]
        masked[places] = self._replace(labels, draws(keys, totals, _TARGETS))
        return MaskedRows(masked, places, labels, totals)

    def _choose(self, tokens: Integers, sizes: Integers, keys: Bits) -> tuple[Integers, Integers]:
        """Return the token indices to predict, ascending, and their number per row."""
        whole = self._objective.max_span_words > 1
        words = _Words(tokens, sizes.cumsum(), self._vocabulary, whole, self._microsoft)
        if not words.candidates.size:
            return words.candidates, np.zeros_like(sizes)
        budgets = np.minimum(self._budgets(sizes), words.bounds[1:] - words.bounds[:-1])
        choose = self._choose_microsoft if self._microsoft else self._choose_uniform
        chosen = np.flatnonzero(choose(words, budgets, keys))
        counts = np.diff(chosen.searchsorted(words.bounds))
        if self._microsoft and int(counts.max()) > self.max_targets:
            place = np.arange(chosen.size) - np.repeat(counts.cumsum() - counts, counts)
            chosen = chosen[place < self.max_targets]
            counts = np.minimum(counts, self.max_targets)
        return words.candidates[chosen], counts

    def _budgets(self, sizes: Integers) -> Integers:
        rounded = np.rint(sizes * self._objective.mask_probability)
        budgets: Integers = np.maximum(rounded, 1).astype(np.int64)
        return budgets

    def _spans(self, random_bits: Bits) -> Integers:
        """Return span lengths in words; length n has probability proportional to 1/n."""
        spans = np.ones(random_bits.size, np.int64)
        for bound in self._span_bounds:
            spans += random_bits >= bound
        return spans

    def _choose_microsoft(self, words: _Words, budgets: Integers, keys: Bits) -> Booleans:
        """Return [C] bool: one n-gram in each window, left to right, until the budget is passed."""
        window = int(1 / self._objective.mask_probability)
        counts = words.counts // window + 1
        random_bits = draws(keys, counts, _WORDS)
        spans = self._spans(random_bits)
        places = (random_bits & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
        num_words = words.counts.repeat(counts)
        contexts = spans * window
        # A span that exceeds its window shifts the next window.
        advances = np.maximum(contexts, (places * contexts).astype(np.int64) + spans)
        offsets = _before(advances, counts)
        inside = offsets < num_words
        offsets, spans, places, num_words = (
            column[inside] for column in (offsets, spans, places, num_words)
        )
        contexts = np.minimum(contexts[inside], num_words - offsets)
        begins = offsets + (places * contexts).astype(np.int64)
        ends = np.minimum(begins + spans, num_words)
        row_starts = np.repeat(words.word_bounds[:-1], counts)[inside]
        in_span = _cover(row_starts + begins, row_starts + ends, int(words.word_bounds[-1]))
        sizes = np.diff(words.firsts, append=words.candidates.size)
        taken_before = _before(sizes * in_span, words.counts)
        taken = in_span & (taken_before < budgets.repeat(words.counts))
        return taken.repeat(sizes)

    def _choose_uniform(self, words: _Words, budgets: Integers, keys: Bits) -> Booleans:
        """Return [C] bool: spans that tile the row, in random order until the budget is met."""
        random_bits = draws(keys, words.counts, _WORDS)
        offsets = _before(self._spans(random_bits), words.counts)
        inside = offsets < words.counts.repeat(words.counts)
        # Spans tile the words, so each ends where the next begins.
        row_starts = np.repeat(words.word_bounds[:-1], words.counts)[inside]
        begins = words.firsts[row_starts + offsets[inside]]
        sizes = np.diff(begins, append=words.candidates.size)
        counts = np.diff(begins.searchsorted(words.bounds))
        rows = np.repeat(np.arange(counts.size, dtype=np.uint64), counts)
        # Sort key: row, random bits, span.
        order = random_bits[inside] & np.uint64((1 << _ORDER_BITS) - 1)
        order |= rows << np.uint64(_ORDER_BITS)
        order <<= np.uint64(_SPAN_BITS)
        order |= np.arange(begins.size, dtype=np.uint64)
        order.sort()
        spans = (order & np.uint64((1 << _SPAN_BITS) - 1)).astype(np.int64)
        room = budgets.repeat(counts) - _before(sizes[spans], counts)
        spans, room = spans[room > 0], room[room > 0]
        begins = begins[spans]
        return _cover(begins, begins + np.minimum(sizes[spans], room), words.candidates.size)

    def _replace(self, labels: Integers, random_bits: Bits) -> Integers:
        """Return [m] int64: [MASK], a random token, or the token itself."""
        decisions = (random_bits >> np.uint64(32)).astype(np.int64)
        masked_below = self._objective.mask_token_probability
        random_below = masked_below + self._objective.random_token_probability
        low = random_bits & np.uint64(0xFFFFFFFF)
        ordinary = self._vocabulary.ordinary_ids
        number = self._vocabulary.num_tokens if self._microsoft else ordinary.size
        random_tokens = ((low * np.uint64(number)) >> np.uint64(32)).astype(np.int64)
        if not self._microsoft:
            random_tokens = ordinary[random_tokens]
        unmasked = np.where(decisions < int(random_below * 2.0**32), random_tokens, labels)
        return np.where(decisions < int(masked_below * 2.0**32), self._vocabulary.mask_id, unmasked)


def _groups(sizes: Integers) -> Iterator[tuple[slice, int, int]]:
    """Split rows into groups of bounded size; yield rows, first token and end of each."""
    ends = sizes.cumsum()
    first = begin = 0
    while first < sizes.size:
        limit = begin + _TOKENS_AT_ONCE
        stop = max(int(ends.searchsorted(limit, side="right")), first + 1)
        end = int(ends[stop - 1])
        yield slice(first, stop), begin, end
        first, begin = stop, end


def _before(values: Integers, counts: Integers) -> Integers:
    """Return the exclusive cumulative sum of values within groups of the given sizes."""
    sums = values.cumsum() - values
    firsts = counts.cumsum() - counts
    # The base of an empty group is not used.
    bases = sums[np.minimum(firsts, max(values.size - 1, 0))]
    inside: Integers = sums - bases.repeat(counts)
    return inside


def _cover(begins: Integers, ends: Integers, size: int) -> Booleans:
    """Return [size] bool, True inside the disjoint intervals [begin, end)."""
    changes = np.zeros(size + 1, np.int8)
    changes[begins] += 1
    changes[ends] -= 1
    return np.cumsum(changes[:-1], dtype=np.int8) > 0

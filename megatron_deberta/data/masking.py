"""Which tokens of a row are predicted, and what stands in their place.

Owns both masking modes as pure functions of (seed, sample index). Refuses to know documents.

``released`` is Microsoft's NGramMaskGenerator: one n-gram in each window of n * int(1/p) words,
left to right, until round(p * length) tokens are taken, which leaves the row's end short of
masks; random tokens come from the whole vocabulary. ``uniform`` cuts the row into spans with the
same length distribution and takes spans in random order until exactly that many tokens are
masked, so every position is equally likely; the last span loses the pieces beyond the budget
(possibly within a word), and random tokens are never special.

Source: He et al. 2021, arXiv:2006.03654, section 5.1.1 (15 %, spans up to three tokens);
microsoft/DeBERTa ``DeBERTa/apps/tasks/mlm_task.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_deberta.config.schema import ObjectiveConfig
from megatron_deberta.data.randomness import Purpose, keyed_generator
from megatron_deberta.data.vocabulary import Vocabulary

_RELEASED_SLACK = 8
"""Extra slots in ``released`` mode, whose last word may pass the budget; longer words are cut."""


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A row after masking.

    Attributes:
        tokens: [n] int64, masked.
        positions: [m] int64, ascending, of the tokens to predict.
        labels: [m] int64, the original tokens there.
    """

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


class Masker:
    """Masks rows as the objective says.

    Args:
        objective: probabilities, span length and mode.
        vocabulary: special ids and word starts.
        sequence_length: N.
        seed: of the run.
        purpose: training or validation masks.

    Attributes:
        max_targets: M, the most positions a row can have; a constant, so that shapes are static.
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
        self._seed = seed
        self._purpose = purpose
        shares = 1.0 / np.arange(1, objective.max_span_words + 1)
        self._span_bounds = np.cumsum(shares / shares.sum())[:-1]
        self._released = objective.masking == "released"
        slack = _RELEASED_SLACK if self._released else 0
        self.max_targets = min(self._budget(sequence_length) + slack, sequence_length)

    def __call__(self, tokens: npt.NDArray[np.int64], sample_index: int) -> MaskedRow:
        """Mask a row.

        Args:
            tokens: [n] int64 ids inside the vocabulary, n <= N; not changed.
            sample_index: global index of the sample; the mask's key.

        Returns:
            The masked row; [CLS], [SEP] and other special tokens are never chosen.
        """
        generator = keyed_generator(self._seed, self._purpose, sample_index)
        candidates = np.flatnonzero(~self._vocabulary.is_special[tokens])
        if candidates.size == 0:
            return MaskedRow(tokens, candidates, candidates)
        words = self._word_bounds(tokens, candidates)
        budget = min(self._budget(tokens.size), candidates.size)
        choose = self._choose_released if self._released else self._choose_uniform
        chosen = choose(words, budget, generator)
        positions = candidates[chosen][: self.max_targets]
        labels = tokens[positions]
        masked = tokens.copy()
        masked[positions] = self._replace(labels, generator)
        return MaskedRow(masked, positions, labels)

    def _budget(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self._objective.mask_probability))

    def _word_bounds(
        self, tokens: npt.NDArray[np.int64], candidates: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return [words + 1] int64: where words begin among the candidates, then their number."""
        if self._objective.max_span_words == 1:
            return np.arange(candidates.size + 1)
        begins = self._vocabulary.word_starts[tokens[candidates]]
        begins[0] = True
        if not self._released:
            # A word does not go on behind a special token; the released code lets it.
            begins[1:] |= np.diff(candidates) > 1
        return np.append(np.flatnonzero(begins), candidates.size)

    def _draw_spans(self, count: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return [count] span lengths in words, n with p proportional to 1/n."""
        return 1 + np.searchsorted(self._span_bounds, generator.random(count), side="right")

    def _choose_released(
        self, words: npt.NDArray[np.int64], budget: int, generator: np.random.Generator
    ) -> npt.NDArray[np.bool_]:
        num_words = words.size - 1
        window = int(1 / self._objective.mask_probability)
        spans = self._draw_spans(num_words // window + 1, generator)
        places = generator.random(spans.size)
        contexts = spans * window
        # A span that sticks out of its window pushes the next window on.
        advances = np.maximum(contexts, (places * contexts).astype(np.int64) + spans)
        offsets = np.cumsum(advances) - advances
        inside = offsets < num_words
        offsets, spans, places = offsets[inside], spans[inside], places[inside]
        contexts = np.minimum(contexts[inside], num_words - offsets)
        begins = offsets + (places * contexts).astype(np.int64)
        in_span = _cover(begins, np.minimum(begins + spans, num_words), num_words)
        sizes = np.diff(words)
        taken_before = np.cumsum(sizes * in_span) - sizes * in_span
        return np.repeat(in_span & (taken_before < budget), sizes)

    def _choose_uniform(
        self, words: npt.NDArray[np.int64], budget: int, generator: np.random.Generator
    ) -> npt.NDArray[np.bool_]:
        num_words = words.size - 1
        ends = np.cumsum(self._draw_spans(num_words, generator))
        ends = ends[: int(np.searchsorted(ends, num_words)) + 1]
        ends[-1] = num_words
        token_ends = words[ends]
        sizes = np.diff(token_ends, prepend=0)
        order = np.argsort(generator.random(ends.size))
        taken = np.cumsum(sizes[order])
        last = int(np.searchsorted(taken, budget))
        chosen = order[: last + 1]
        begins, stops = (token_ends - sizes)[chosen], token_ends[chosen]
        stops[-1] -= taken[last] - budget
        return _cover(begins, stops, int(words[-1]))

    def _replace(
        self, labels: npt.NDArray[np.int64], generator: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        """Return [m] int64: [MASK], a random token, or the token itself."""
        lots = generator.random(labels.size)
        masked_below = self._objective.mask_token_probability
        random_below = masked_below + self._objective.random_token_probability
        if self._released:
            random_tokens = generator.integers(0, self._vocabulary.num_tokens, labels.size)
        else:
            ordinary = self._vocabulary.ordinary_ids
            random_tokens = ordinary[generator.integers(0, ordinary.size, labels.size)]
        kept = np.where(lots < random_below, random_tokens, labels)
        return np.where(lots < masked_below, self._vocabulary.mask_id, kept)


def _cover(
    begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], size: int
) -> npt.NDArray[np.bool_]:
    """Return [size] bool, True inside the disjoint intervals [begin, end)."""
    changes = np.zeros(size + 1, np.int64)
    changes[begins] += 1
    changes[ends] -= 1
    return np.cumsum(changes[:-1]) > 0

"""Masking: budget, positions, replacements and spans in both modes."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megatron_deberta.config.schema import ObjectiveConfig
from megatron_deberta.data import masking as masking_module
from megatron_deberta.data.masking import Masker
from megatron_deberta.data.randomness import Purpose, draws
from megatron_deberta.errors import DataError

LENGTH = 512
ROWS = 400


class OneRow:
    """A masker for single rows."""

    def __init__(self, masker):
        self.masker = masker
        self.max_targets = masker.max_targets

    def __call__(self, tokens, sample):
        return self.masker(tokens, np.array([tokens.size]), np.array([sample]))


def masker(vocabulary, seed=1, purpose=Purpose.TRAINING_MASK, length=LENGTH, **objective):
    return OneRow(Masker(ObjectiveConfig(**objective), vocabulary, length, seed, purpose))


def random_row(vocabulary, seed, length=LENGTH):
    generator = np.random.default_rng(seed)
    tokens = generator.choice(vocabulary.ordinary_ids, length)
    tokens[[0, -1]] = vocabulary.cls_id, vocabulary.sep_id
    return tokens


def positions_of_many(vocabulary, rows=ROWS, **objective):
    mask = masker(vocabulary, **objective)
    return [mask(random_row(vocabulary, i), i) for i in range(rows)]


def rate_by_sixteenth(masked_rows, length=LENGTH):
    counts = np.zeros(length)
    for row in masked_rows:
        counts[row.positions] += 1
    return counts.reshape(16, -1).mean(axis=1) / len(masked_rows)


@pytest.mark.parametrize("masking", ["microsoft", "uniform"])
def test_pure_function_of_seed_and_sample(vocabulary, masking):
    tokens = random_row(vocabulary, 0)
    before = tokens.copy()

    def masked(sample, **arguments):
        return masker(vocabulary, masking=masking, **arguments)(tokens, sample).tokens.tolist()

    assert masked(5) == masked(5)
    np.testing.assert_array_equal(tokens, before)
    variants = [
        masked(5),
        masked(6),
        masked(5, seed=2),
        masked(5, purpose=Purpose.VALIDATION_MASK),
    ]
    assert len({tuple(variant) for variant in variants}) == 4


@pytest.mark.parametrize("masking", ["microsoft", "uniform"])
@pytest.mark.parametrize("span", [1, 3])
def test_mask_does_not_depend_on_other_rows(vocabulary, masking, span, monkeypatch):
    """Alone, in a batch with rows of any length and of no text, and in other groups."""
    sizes = [2, 512, 3, 2, 40, 511, 2]
    rows = [random_row(vocabulary, number, size) for number, size in enumerate(sizes)]
    mask = masker(vocabulary, masking=masking, max_span_words=span)
    alone = [mask(row, 7 * number) for number, row in enumerate(rows)]
    for limit in (1 << 16, 600):
        monkeypatch.setattr(masking_module, "_TOKENS_AT_ONCE", limit)
        ids = np.arange(len(rows)) * 7
        together = mask.masker(np.concatenate(rows), np.array(sizes), ids)
        assert together.counts.tolist() == [row.positions.size for row in alone]
        np.testing.assert_array_equal(
            together.tokens, np.concatenate([row.tokens for row in alone])
        )
        np.testing.assert_array_equal(
            together.labels, np.concatenate([row.labels for row in alone])
        )
        shifts = np.cumsum([0, *sizes])
        places = [row.positions + shift for row, shift in zip(alone, shifts, strict=False)]
        np.testing.assert_array_equal(together.positions, np.concatenate(places))


@pytest.mark.parametrize("masking", ["microsoft", "uniform"])
def test_labels_are_the_originals_and_specials_stay(vocabulary, masking):
    mask = masker(vocabulary, masking=masking)
    for index in range(50):
        tokens = random_row(vocabulary, index)
        tokens[[100, 101, 300]] = vocabulary.sep_id, 3, vocabulary.mask_id
        row = mask(tokens, index)
        np.testing.assert_array_equal(row.labels, tokens[row.positions])
        assert (np.diff(row.positions) > 0).all()
        assert not vocabulary.is_special[row.labels].any()
        elsewhere = np.ones(LENGTH, bool)
        elsewhere[row.positions] = False
        np.testing.assert_array_equal(row.tokens[elsewhere], tokens[elsewhere])
        assert row.positions.size <= mask.max_targets


@pytest.mark.parametrize("length", [3, 4, 7, 20, 64, 511, 512])
@pytest.mark.parametrize("span", [1, 3, 8])
def test_uniform_takes_exactly_the_budget(vocabulary, length, span):
    mask = masker(vocabulary, masking="uniform", max_span_words=span)
    for index in range(20):
        row = mask(random_row(vocabulary, index, length), index)
        assert row.positions.size == max(1, round(0.15 * length))
    assert masker(vocabulary, length=length).max_targets == max(1, round(0.15 * length))


@pytest.mark.parametrize("masking", ["microsoft", "uniform"])
def test_row_without_text_has_no_targets(vocabulary, masking):
    row = masker(vocabulary, masking=masking)(np.array([1, 2]), 0)
    assert row.positions.size == row.labels.size == 0


def test_uniform_rate_is_the_same_everywhere(vocabulary):
    rates = rate_by_sixteenth(positions_of_many(vocabulary, 1500, masking="uniform"))
    assert rates.mean() == pytest.approx(77 / LENGTH)
    # Four standard errors of 48,000 draws that come in spans.
    np.testing.assert_allclose(rates, rates.mean(), atol=0.012)


def test_released_is_microsofts_generator(vocabulary):
    """Rates by place, targets a row and spans equal those of the loop as released."""
    ours = positions_of_many(vocabulary, 1500, masking="microsoft")
    generator = random.Random(0)
    theirs = [released_loop(random_row(vocabulary, i), vocabulary, generator) for i in range(1500)]
    counts = np.zeros(LENGTH)
    for positions in theirs:
        counts[positions] += 1
    expected = counts.reshape(16, -1).mean(axis=1) / len(theirs)
    np.testing.assert_allclose(rate_by_sixteenth(ours), expected, atol=0.012)
    for size in (lambda p: len(p), lambda p: runs(p)[1] / len(p), lambda p: runs(p)[4] / len(p)):
        a = np.array([size(row.positions.tolist()) for row in ours], float)
        b = np.array([size(positions) for positions in theirs], float)
        error = np.hypot(a.std(), b.std()) / np.sqrt(len(a))
        assert abs(a.mean() - b.mean()) <= 4 * error + 1e-9


def runs(positions):
    """Runs of adjacent positions by length."""
    if not len(positions):
        return Counter()
    breaks = np.flatnonzero(np.diff(positions) > 1) + 1
    return Counter(len(part) for part in np.split(np.asarray(positions), breaks))


def released_loop(tokens, vocabulary, generator, max_gram=3, probability=0.15):
    """NGramMaskGenerator.mask_tokens of microsoft/DeBERTa, restated, without replacements."""
    indices = [i for i, token in enumerate(tokens) if not vocabulary.is_special[token]]
    begins = vocabulary.word_starts | vocabulary.single_marks
    unigrams = []
    for i in indices:
        if unigrams and not begins[tokens[i]]:
            unigrams[-1].append(i)
        else:
            unigrams.append([i])
    budget = max(1, round(len(tokens) * probability))
    masked = [False] * len(unigrams)
    offset = 0
    while offset < len(unigrams):
        n = generator.choices(range(1, max_gram + 1), [1 / k for k in range(1, max_gram + 1)])[0]
        context = min(n * int(1 / probability), len(unigrams) - offset)
        start = offset + generator.randint(0, context - 1)
        end = min(start + n, len(unigrams))
        offset = max(offset + context, end)
        masked[start:end] = [True] * (end - start)
    positions = []
    for chosen, word in zip(masked, unigrams, strict=True):
        if chosen:
            positions += word
            if len(positions) >= budget:
                break
    return positions


@pytest.mark.parametrize("masking", ["microsoft", "uniform"])
@pytest.mark.parametrize(("mask", "random"), [(0.8, 0.1), (0.3, 0.7)])
def test_eighty_ten_ten(vocabulary, masking, mask, random):
    shares = {"mask_token_probability": mask, "random_token_probability": random}
    rows = positions_of_many(vocabulary, masking=masking, **shares)
    now = np.concatenate([row.tokens[row.positions] for row in rows])
    before = np.concatenate([row.labels for row in rows])
    assert (now == vocabulary.mask_id).mean() == pytest.approx(mask, abs=0.01)
    assert (now == before).mean() == pytest.approx(1 - mask - random, abs=0.01)
    replaced = now[(now != vocabulary.mask_id) & (now != before)]
    assert replaced.size / now.size == pytest.approx(random, abs=0.01)
    assert vocabulary.is_special[replaced].any() == (masking == "microsoft")
    assert replaced.max() < vocabulary.num_tokens < vocabulary.size
    # Every ordinary id stands in for one, more or less evenly.
    assert np.unique(replaced).size >= vocabulary.ordinary_ids.size * 0.99


def test_spans_are_drawn_with_p_proportional_to_one_over_n(vocabulary):
    """Counted at the source, because neighbouring spans merge in the text."""
    mask = masker(vocabulary).masker
    random_bits = draws(np.array([5], np.uint64), np.array([60_000]), 0)
    drawn = np.bincount(mask._spans(random_bits), minlength=4)
    np.testing.assert_allclose(drawn / 60_000, [0, 6 / 11, 3 / 11, 2 / 11], atol=0.01)


def test_uniform_masks_whole_words(vocabulary):
    """Only the last span of a row may be cut, so at most one word is masked in part."""
    mask = masker(vocabulary, masking="uniform")
    for index in range(100):
        tokens = random_row(vocabulary, index)
        masked = np.zeros(LENGTH, bool)
        masked[mask(tokens, index).positions] = True
        begins = vocabulary.word_starts[tokens] | vocabulary.is_special[tokens]
        begins[1] = True
        words = np.split(masked, np.flatnonzero(begins)[1:])
        assert sum(0 < word.sum() < word.size for word in words) <= 1


def test_uniform_span_lengths_in_text(vocabulary):
    """Alone, a span of n words comes as often as drawn: 6 to 3 to 2."""
    single = replace(vocabulary, word_starts=np.ones(vocabulary.size, bool), single_marks=None)
    found = Counter()
    for row in positions_of_many(single, 1000, masking="uniform", mask_probability=0.01):
        found += runs(row.positions)
    total = sum(found.values())
    # Two or three spans a row of five targets: the last is cut, which favours short runs.
    assert found[1] / total == pytest.approx(0.6, abs=0.1)
    assert found[1] > 1.5 * found[2] > 1.5 * found[3]


def test_single_pieces_ignore_words(vocabulary):
    positions = Counter()
    for row in positions_of_many(vocabulary, 200, masking="uniform", max_span_words=1):
        positions += runs(row.positions)
    # Independent single pieces at 15 %: a run of one has p = 0.85.
    assert positions[1] / sum(positions.values()) == pytest.approx(0.85, abs=0.02)


def test_vocabulary_refuses_what_does_not_fit(vocabulary):
    assert vocabulary.ordinary_ids.tolist() == list(range(4, 189))
    with pytest.raises(DataError, match="word_starts has shape"):
        replace(vocabulary, size=199)
    with pytest.raises(DataError, match="do not fit 190 tokens"):
        replace(vocabulary, mask_id=190)

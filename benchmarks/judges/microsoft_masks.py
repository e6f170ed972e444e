"""Microsoft's tokenizer and mask generator beside ours, on the texts of Python's documentation."""

from __future__ import annotations

import io
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from benchmarks.judges.rows import Comparison
from benchmarks.judges.shims import load
from megatron_deberta.config.schema import ObjectiveConfig
from megatron_deberta.data.masking import Masker
from megatron_deberta.data.randomness import Purpose, draws, hash_values
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.tokenizer import Tokenizer
from megatron_deberta.tokenizer.loading import sentencepiece_tokenizer

_LENGTH = 512
_ROUNDS = 12
"""Masks of each row that are compared by statistics."""
_SPANS = (1, 3)
"""Words of the longest n-gram: RTD, and masked language modelling."""
_P_VALUE = 1e-3
_EIGHTHS = 8
_SWAP = (0.8, 0.9)
"""Microsoft keeps a token for these random numbers, we replace it at random, and the other way
round for those above."""
Integers = npt.NDArray[np.int64]


class _SameDraws:
    """Random numbers for Microsoft's generator, from the random bits of one of our rows."""

    def __init__(self, masker: Masker, index: int) -> None:
        key = hash_values(masker._key, np.array([index]))
        self._words = iter(draws(key, np.array([_LENGTH]), 0).tolist())
        self._targets = iter(draws(key, np.array([_LENGTH]), 1).tolist())
        self._bits = 0

    def random(self) -> float:
        """Draw the length of an n-gram, or what becomes of a token."""
        if sys._getframe(1).f_code.co_name == "_choice":
            self._bits = next(self._words)
            return float(self._bits / 2.0**64)
        self._bits = next(self._targets)
        value = (self._bits >> 32) / 2.0**32
        if value < _SWAP[0]:
            return value
        return value + 0.1 if value < _SWAP[1] else value - 0.1

    def randint(self, low: int, high: int) -> int:
        """Draw the place of an n-gram."""
        return low + int((self._bits & 0xFFFFFFFF) * 2.0**-32 * (high - low + 1))

    def choice(self, values: list[str]) -> str:
        """Draw a random token."""
        return values[(self._bits & 0xFFFFFFFF) * len(values) >> 32]


def masks() -> Iterator[Comparison]:
    """Compare the ids of the text, then masks: given the same random numbers, and by statistics."""
    lines, (ours, content) = judged_lines(), judged_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spm.model"
        path.write_bytes(content)
        theirs = load("deberta.spm_tokenizer").SPMTokenizer(str(path))
    same = ties = 0
    for line in lines:
        found, expected = ours.encode(line), theirs.convert_tokens_to_ids(theirs.tokenize(line))
        same += list(found) == expected
        # The same pieces in another order have the same probability.
        ties += list(found) != expected and sorted(found) == sorted(expected)
    yield Comparison(
        "SPMTokenizer: ids of the lines of Python's documentation",
        f"{len(lines) - same} lines differ, {ties} of them in the order of the same pieces",
        "order only", len(lines), same + ties == len(lines),
    )  # fmt: skip
    pieces = [piece for line in lines for piece in theirs.tokenize(line)]
    size = _LENGTH - 2
    rows = [
        ["[CLS]", *pieces[start : start + size], "[SEP]"]
        for start in range(0, len(pieces) - size, size)
    ]
    # A short row, whose budget is rounded
    rows += [row[: 30 + 7 * number] for number, row in enumerate(rows[:20])]
    for longest in _SPANS:
        generator = load("apps.tasks.mlm_task").NGramMaskGenerator(theirs, max_gram=longest)
        objective = ObjectiveConfig(masking="microsoft", max_span_words=longest)
        masker = Masker(objective, Vocabulary.of(ours), _LENGTH, 1, Purpose.TRAINING_MASK)
        yield _given_the_same_draws(generator, masker, theirs, rows, longest)
        full = [row for row in rows if len(row) == _LENGTH]
        yield from _by_statistics(generator, masker, theirs, full, longest)


def _given_the_same_draws(
    generator: Any, masker: Masker, theirs: Any, rows: list[list[str]], longest: int
) -> Comparison:
    differing = cut = 0
    for index, row in enumerate(rows):
        tokens, labels = generator.mask_tokens(list(row), _SameDraws(masker, index))
        expected = theirs.convert_tokens_to_ids(tokens)
        ids = np.array(theirs.convert_tokens_to_ids(row), np.int64)
        found = masker(ids, np.array([len(ids)]), np.array([index]))
        positions = np.flatnonzero(labels)
        cut += len(positions) > masker.max_targets
        # Ours leaves the rest of a very long last word as it is.
        beyond = positions[masker.max_targets :]
        after = np.array(expected, np.int64)
        after[beyond], positions = ids[beyond], positions[: masker.max_targets]
        agree = np.array_equal(found.tokens, after)
        agree &= np.array_equal(found.positions, positions)
        agree &= np.array_equal(found.labels, np.array(labels)[positions])
        differing += not agree
    return Comparison(
        f"NGramMaskGenerator, n-grams of up to {longest} words, given the same random numbers: "
        "positions, labels and replacements (objective.masking=microsoft)",
        f"{differing} rows differ; the last word is cut in {cut}", "0 rows; cut in 1 %", len(rows),
        not differing and cut <= len(rows) / 100,
    )  # fmt: skip


class _Counts:
    """Counts of masks in rows of one length."""

    def __init__(self) -> None:
        self.eighths = np.zeros(_EIGHTHS, np.int64)
        self.runs: Counter[int] = Counter()
        self.fates = np.zeros(3, np.int64)
        self.totals: list[int] = []

    def add(self, before: Integers, after: Integers, positions: Integers, mask_id: int) -> None:
        """Count a row."""
        eighth = positions * _EIGHTHS // len(before)
        self.eighths += np.bincount(eighth, minlength=_EIGHTHS)
        parts = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
        self.runs.update(min(len(part), 8) for part in parts)
        is_mask, is_kept = after[positions] == mask_id, after[positions] == before[positions]
        self.fates += [is_mask.sum(), is_kept.sum(), (~is_mask & ~is_kept).sum()]
        self.totals.append(len(positions))


def _by_statistics(
    generator: Any, masker: Masker, theirs: Any, rows: list[list[str]], longest: int
) -> Iterator[Comparison]:
    """Compare positions, lengths of runs, shares and totals by chi-square tests."""
    counts = _Counts(), _Counts()
    rng, mask_id = random.Random(longest), theirs.vocab["[MASK]"]
    for number in range(_ROUNDS):
        for index, row in enumerate(rows):
            ids = np.array(theirs.convert_tokens_to_ids(row), np.int64)
            found = masker(ids, np.array([len(ids)]), np.array([number * len(rows) + index]))
            counts[0].add(ids, found.tokens, found.positions, mask_id)
            tokens, labels = generator.mask_tokens(list(row), rng)
            after = np.array(theirs.convert_tokens_to_ids(tokens), np.int64)
            counts[1].add(ids, after, np.flatnonzero(labels), mask_id)
    tables = {
        "eighth of the row": [each.eighths for each in counts],
        "length of runs": [[each.runs[size] for size in range(1, 9)] for each in counts],
        "[MASK], kept, random": [each.fates for each in counts],
        "masks per row": _histograms(*(each.totals for each in counts)),
    }
    for name, table in tables.items():
        columns = np.array(table)
        columns = columns[:, columns.sum(axis=0) > 0]
        p = float(stats.chi2_contingency(columns).pvalue) if columns.shape[1] > 1 else 1.0
        ours, other = (columns / columns.sum(axis=1, keepdims=True)).tolist()
        apart = max(abs(a - b) for a, b in zip(ours, other, strict=True))
        yield Comparison(
            f"NGramMaskGenerator, n-grams of up to {longest} words, own random numbers: {name} "
            "(objective.masking=microsoft)",
            f"{100 * apart:.2f} points apart, chi-square p = {p:.2g}", f"p > {_P_VALUE:g}",
            len(counts[0].totals), p > _P_VALUE,
        )  # fmt: skip


def _histograms(ours: list[int], theirs: list[int]) -> list[list[int]]:
    """Return how often each total occurs on both sides, rare ones together."""
    common = [value for value, number in Counter(ours + theirs).items() if number >= 10]
    found = [[side.count(value) for value in common] for side in (ours, theirs)]
    return [[*row, len(side) - sum(row)] for row, side in zip(found, (ours, theirs), strict=True)]


def judged_tokenizer() -> tuple[Tokenizer, bytes]:
    """Return a tokenizer of the texts, and its SentencePiece model."""
    model = io.BytesIO()
    # Optional: every other program of the benchmarks can be imported without it.
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(judged_lines()), model_writer=model, vocab_size=2000, minloglevel=2,
        pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]",
        eos_piece="[SEP]", unk_piece="[UNK]",
    )  # fmt: skip
    return sentencepiece_tokenizer(model.getvalue(), "judged"), model.getvalue()


def judged_lines() -> list[str]:
    """Return the lines of the texts."""
    return [line for text in topics.values() for line in text.splitlines() if line.strip()]

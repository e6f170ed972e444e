"""Windows of a text: each token is scored once, from the right context; words are counted."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest

from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.errors import DataError
from megatron_deberta.evaluate.likelihood import WindowRows
from megatron_deberta.evaluate.perplexity import WordText, read_words
from tests.support.corpus import corpus_path

VOCABULARY = Vocabulary(
    size=300,
    num_tokens=290,
    pad_id=0,
    cls_id=1,
    sep_id=2,
    mask_id=289,
    special_ids=(0, 1, 2, 3, 289),
    word_starts=np.ones(300, np.bool_),
    fingerprint="",
)
LENGTHS, STRIDES, MASKS = (10, 22, 200), (1, 3, 8, 1000), (0, 1, 3)


@pytest.mark.parametrize("size", [1, 5, 20, 21, 101])
def test_each_token_is_scored_once(size: int) -> None:
    tokens = np.arange(10, 10 + size)
    for length, stride, mask_every in itertools.product(LENGTHS, STRIDES, MASKS):
        rows = WindowRows.of_text(tokens, VOCABULARY, length, stride, mask_every)
        seen: list[int] = []
        for numbers in rows.batches(100, 2):
            batch = rows.batch(numbers)
            assert batch.inputs.causal == (mask_every == 0)
            assert batch.inputs.input_ids.size(1) <= length
            if not numbers.size:
                continue
            assert batch.sample_index.tolist() == numbers.tolist()
            for ids, places, labels in zip(
                batch.inputs.input_ids.tolist(),
                batch.masked_positions.tolist(),
                batch.labels.tolist(),
                strict=True,
            ):
                for place, label in zip(places, labels, strict=True):
                    if place < 0:
                        continue
                    seen.append(label)
                    if mask_every:
                        assert ids[place] == VOCABULARY.mask_id
                        assert label not in ids
                    else:
                        assert ids[place + 1] == label
        assert sorted(seen) == tokens.tolist(), (length, stride, mask_every)


def test_context() -> None:
    """With stride 4 in rows of 10 tokens, 8 of them text, there are 4 tokens of context."""
    left = WindowRows.of_text(np.arange(10, 34), VOCABULARY, 10, 4)
    assert (left.firsts - left.begins).tolist() == [0, 4, 4, 4, 4]
    both = WindowRows.of_text(np.arange(10, 34), VOCABULARY, 10, 4, 1)
    assert (both.firsts - both.begins).tolist() == [0, 2, 2, 2, 2]
    assert (both.ends - both.stops).tolist() == [2, 2, 2, 2, 0]


def test_padding_to_a_multiple() -> None:
    batch = WindowRows.of_text(np.arange(10, 15), VOCABULARY, 64, 64).batch(np.array([0]), 4)
    assert batch.inputs.input_ids.tolist() == [[1, 10, 11, 12, 13, 14, 2, 0]]
    assert batch.inputs.is_token.tolist() == [[True] * 7 + [False]]
    assert batch.masked_positions.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.labels.tolist() == [[10, 11, 12, 13, 14]]


def test_words_are_those_of_wikitext() -> None:
    text = WordText.of(" \n = Title = \n\nA word\u2028here")
    assert text.lines == (" \n", " = Title = \n", "\n", "A word\u2028here")
    assert text.num_words == 1 + 4 + 1 + 4
    with gzip.open(corpus_path("wikitext103.valid.txt.gz"), "rt", encoding="utf-8") as file:
        assert WordText.of(file.read()).num_words == 217_646


def test_bad_files_are_named(tmp_path: Path) -> None:
    blank, binary, damaged = (tmp_path / name for name in ("blank", "binary", "cut.gz"))
    blank.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    damaged.write_bytes(gzip.compress(b"some words " * 50)[:30])
    for path, message in (
        (tmp_path / "absent", "absent: cannot be read: No such file"),
        (tmp_path, "not a regular file"),
        (blank, "has no words"),
        (binary, "not in UTF-8"),
        (damaged, "cannot be read"),
    ):
        with pytest.raises(DataError, match=message):
            read_words(str(path))

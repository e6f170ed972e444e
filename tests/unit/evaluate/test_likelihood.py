"""Likelihoods of windows against slow restatements; each token is scored once; words."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.errors import DataError
from megatron_deberta.evaluate.language_models import Form, Perplexity, WordText, read_words
from megatron_deberta.evaluate.likelihood import WindowRows, score_rows
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import MaskedLanguageModel
from tests.support.corpus import corpus_path
from tests.support.tiny_models import TEXT, V2, random_weights, tiny_tokenizer

GROUPS = single_process_groups(torch.device("cpu"))
WORDS = WordText.of("\n".join(TEXT) + "\n")
VOCABULARY = Vocabulary.of(tiny_tokenizer())
TOKENS = tiny_tokenizer().encode_texts(WORDS.lines)[0].astype(np.int64)
LENGTHS, STRIDES, MASKS = (10, 22, 200), (1, 3, 8, 1000), (0, 1, 3)


@pytest.mark.parametrize("size", [1, 5, 20, 21, 101])
def test_each_token_is_scored_once(size: int) -> None:
    tokens = np.arange(100, 100 + size)
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


def model(*, uniform: bool = False) -> MaskedLanguageModel:
    built = MaskedLanguageModel(V2)
    weights = random_weights(V2)
    if uniform:
        for name in ("embeddings.token.weight", "head.bias"):
            weights[name] = torch.zeros_like(weights[name])
    built.load_state_dict(weights)
    return built.eval()


def rows(mask_every: int, length: int = 40, stride: int = 9) -> WindowRows:
    return WindowRows.of_text(TOKENS, VOCABULARY, length, stride, mask_every)


def measure(built: MaskedLanguageModel, windows: WindowRows) -> float:
    scores = score_rows(built, windows, GROUPS, 100)
    assert scores is not None
    return -float(scores.sum())


def result_of(loss: float, form: Form) -> Perplexity:
    return Perplexity(form, loss, len(TOKENS), 0, WORDS.num_words, WORDS.num_bytes, 40, 9, 0)


@pytest.mark.parametrize("mask_every", [0, 1, 7])
def test_perplexity_of_a_uniform_model(mask_every: int) -> None:
    """Per piece it is the size of the vocabulary; per word, that to the power pieces / words."""
    form: Form = "masked" if mask_every else "autoregressive"
    result = result_of(measure(model(uniform=True), rows(mask_every)), form)
    assert result.per_piece == pytest.approx(V2.vocab_size, rel=1e-5)
    power = len(TOKENS) / WORDS.num_words
    assert power != 1
    assert result.per_word == pytest.approx(V2.vocab_size**power, rel=1e-4)
    assert result_of(1e6, form).per_piece == float("inf")


def test_autoregressive_loss_is_the_sum_over_single_predictions() -> None:
    """One forward pass per token, over the tokens before it in its window."""
    built, windows, expected = model(), rows(0), 0.0
    for begin, first, stop in zip(windows.begins, windows.firsts, windows.stops, strict=True):
        for token in range(first, stop):
            ids = torch.tensor([[VOCABULARY.cls_id, *TOKENS[begin:token].tolist()]])
            with torch.no_grad():
                logits = built.masked_logits(ModelInputs(ids, causal=True))[0, -1]
            expected -= float(logits.log_softmax(-1)[TOKENS[token]])
    assert measure(built, windows) == pytest.approx(expected, rel=1e-5)


def test_masked_loss_is_the_sum_over_masked_rows() -> None:
    built, windows, expected = model(), rows(3), 0.0
    cls, sep, mask = VOCABULARY.cls_id, VOCABULARY.sep_id, VOCABULARY.mask_id
    pairs = zip(windows.begins, windows.ends, windows.firsts, windows.stops, strict=True)
    for begin, end, first, stop in pairs:
        for group in range(3):
            hidden = list(range(first + group, stop, 3))
            ids = torch.tensor([[cls, *TOKENS[begin:end].tolist(), sep]])
            ids[0, [token - begin + 1 for token in hidden]] = mask
            with torch.no_grad():
                logits = built.masked_logits(ModelInputs(ids))[0].log_softmax(-1)
            expected -= sum(float(logits[t - begin + 1, TOKENS[t]]) for t in hidden)
    assert measure(built, windows) == pytest.approx(expected, rel=1e-5)


def test_no_stride_scores_a_sentence_from_the_left() -> None:
    """A sentence of a minimal pair has one row, scored from [CLS] on."""
    built = model()
    sentences = np.split(TOKENS[:60], [12, 30])
    found = score_rows(built, WindowRows.of_sentences(sentences, VOCABULARY), GROUPS, 100)
    assert found is not None
    for score, sentence in zip(found, sentences, strict=True):
        alone = WindowRows.of_text(sentence, VOCABULARY, len(sentence) + 2, len(sentence))
        assert score == pytest.approx(-measure(built, alone), rel=1e-6)

"""Perplexity and log-likelihood of models against slow restatements."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.evaluate.likelihood import WindowRows, score_rows
from megatron_deberta.evaluate.perplexity import Form, Perplexity, WordText
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import MaskedLanguageModel
from tests.support.tiny_models import TEXT, V2, random_weights, tiny_tokenizer

GROUPS = single_process_groups(torch.device("cpu"))
WORDS = WordText.of("\n".join(TEXT) + "\n")
VOCABULARY = Vocabulary.of(tiny_tokenizer())
TOKENS = tiny_tokenizer().encode_texts(WORDS.lines)[0].astype(np.int64)


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

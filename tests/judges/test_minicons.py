"""Pseudo-log-likelihoods of exported masked language models: minicons beside our own scorer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import transformers

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.evaluate.language_models import evaluate_minimal_pairs, evaluate_perplexity
from megatron_deberta.evaluate.likelihood import Metric, score_rows
from megatron_deberta.evaluate.minimal_pairs import build_minimal_pairs, read_minimal_pairs
from megatron_deberta.evaluate.models import language_model_config, open_ranks, open_source_model
from megatron_deberta.hf import MegatronDebertaForMaskedLM
from megatron_deberta.hf.export_model import export_model
from tests.support.judges import importable, record
from tests.support.minimal_pairs import PAIRS
from tests.support.tiny_models import TEXT, V1, V2, random_weights, reader, tiny_tokenizer

pytestmark = pytest.mark.slow

PLAIN = replace(V2, mask_decoder_passes=0, absolute_positions="none")
CONFIGS = {
    "transformers' class": PLAIN,
    "v1, transformers' class": replace(V1, mask_decoder_passes=0, absolute_positions="none"),
    "mask decoder": V2,
}  # fmt: skip
LIMIT = 1e-5


@pytest.fixture(scope="module", autouse=True)
def release() -> Iterator[str]:
    with importable("minicons==0.3.39", "wonderwords==3.0.1") as release:
        yield release


def open_scorer(config: ModelConfig, folder: Path) -> Any:
    from minicons.scorer import MaskedLMScorer

    if config.mask_decoder_passes == 0:
        return MaskedLMScorer(str(folder), "cpu")
    model = MegatronDebertaForMaskedLM.from_pretrained(folder)
    return MaskedLMScorer(model, "cpu", transformers.AutoTokenizer.from_pretrained(folder))


def minicons_scores(scorer: Any, texts: list[str], metric: Metric) -> list[float]:
    """Return the sum of each text's token scores."""
    # It calls a method of tokenizers that transformers 5 does not have, unless it gets ids.
    encoded = scorer.tokenizer(texts, padding=True, return_tensors="pt")
    found: list[float] = scorer.sequence_score(
        encoded, reduction=lambda scores: float(scores.double().sum()), PLL_metric=metric
    )
    return found


def write_pairs(folder: Path) -> list[str]:
    """Write minimal pairs as BLiMP has them; return the sentences, good and bad in turn."""
    pairs = [(good, bad, name) for good, bad, name, _ in PAIRS]
    pairs += [(text, " ".join(text.split()[::-1]), "order") for text in TEXT]
    folder.mkdir()
    keys = ("sentence_good", "sentence_bad", "UID", "field")
    lines = [json.dumps(dict(zip(keys, (*pair, "syntax"), strict=True))) for pair in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return [text for pair in pairs for text in pair[:2]]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if config is PLAIN else ())
        for name, config in CONFIGS.items()
    ],
)
def test_scores_accuracies_and_perplexity(name: str, tmp_path: Path, release: str) -> None:
    config, folder, data = CONFIGS[name], tmp_path / "model", tmp_path / "pairs"
    export_model(config, reader(random_weights(config)), tiny_tokenizer(), folder)
    texts = write_pairs(data)
    scorer = open_scorer(config, folder)
    source = open_source_model(folder, "", "generator")
    run, pairs = language_model_config(source, ()), read_minimal_pairs(str(data))
    tokenizer, differences = tiny_tokenizer(), []
    # Inside a word, an unknown piece is one of its pieces to minicons and its own word to ours.
    known = [tokenizer.unk_id not in tokenizer.encode(text) for text in texts]
    assert len(PAIRS) < sum(known) < len(texts)
    for metric in get_args(Metric):
        task = build_minimal_pairs(run, tokenizer, pairs, metric)
        with open_ranks(run, source) as (module, groups):
            scores = score_rows(module, task.rows, groups, task.tokens_per_batch)
        assert scores is not None
        expected = np.array(minicons_scores(scorer, texts, metric))
        errors = np.abs(scores[task.sides].flatten() / expected - 1)
        differences += list(errors[known] if metric == "within_word_l2r" else errors)
        assert max(differences) <= LIMIT, metric

    accuracies, _ = evaluate_minimal_pairs(folder, str(data))
    good, bad = np.array(minicons_scores(scorer, texts, "original")).reshape(-1, 2).T
    right = good > bad + 1e-4  # A tie, which one pair is, is wrong.
    for score in accuracies.paradigms:
        own = [r for r, pair in zip(right, pairs, strict=True) if pair.paradigm == score.paradigm]
        assert score.accuracy == pytest.approx(np.mean(own))
    assert 0 < right.mean() < 1

    # The perplexity of a text of one row, one token masked at a time.
    (tmp_path / "text.txt").write_text(TEXT[0])
    tokens = len(tokenizer.encode(TEXT[0]))
    found, _ = evaluate_perplexity(
        folder, str(tmp_path / "text.txt"), stride=tokens, mask_every=tokens,
        overrides=[f"data.sequence_length={tokens + 2}"],
    )  # fmt: skip
    (expected_loss,) = minicons_scores(scorer, [TEXT[0]], "original")
    assert found.num_pieces == tokens
    assert found.loss == pytest.approx(-expected_loss, rel=LIMIT)
    record(
        "minicons", release,
        f"pseudo-log-likelihoods of an export, both ways of masking, {name}: evaluate's scores, "
        "accuracies of minimal pairs and perplexity",
        f"{max(differences):.1e} (relative); accuracies equal", f"{LIMIT:.0e}", len(differences),
    )  # fmt: skip

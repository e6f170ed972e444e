"""Minimal pairs: pseudo-log-likelihoods against a slow restatement, accuracies, bad files."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_deberta.config.rules import validate
from megatron_deberta.config.schema import DataConfig, RunConfig, TrainConfig
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.evaluate import minimal_pairs as module
from megatron_deberta.evaluate.likelihood import Metric, score_rows
from megatron_deberta.evaluate.minimal_pairs import (
    MinimalPair,
    MinimalPairTask,
    build_minimal_pairs,
    read_minimal_pairs,
)
from megatron_deberta.hf.loading import build_model
from megatron_deberta.objectives import MaskedLanguageModel
from tests.support.corpus import corpus_path
from tests.support.minimal_pairs import PAIRS, slow_score, write_pairs
from tests.support.tiny_models import V2, random_weights, reader, tiny_tokenizer

GROUPS = single_process_groups(torch.device("cpu"))


def open_pairs(tmp_path: Path, metric: Metric = "original", micro_batch: int = 1) -> Any:
    config = RunConfig(
        model=V2,
        data=DataConfig(sequence_length=96),
        train=TrainConfig(micro_batch_size=micro_batch),
    )
    pairs = read_minimal_pairs(write_pairs(tmp_path / "pairs"))
    return build_minimal_pairs(config, tiny_tokenizer(), pairs, metric)


def loss_model() -> MaskedLanguageModel:
    model = MaskedLanguageModel(V2)
    model.load_state_dict(random_weights(V2))
    return model


@pytest.mark.parametrize(
    "metric", [pytest.param("original", marks=pytest.mark.slow), "within_word_l2r"]
)
def test_scores_are_those_of_one_sentence_and_one_mask_at_a_time(
    tmp_path: Path, metric: Metric
) -> None:
    task = open_pairs(tmp_path, metric)
    module = loss_model().train()
    progress: list[tuple[int, int]] = []
    scores = score_rows(
        module,
        task.rows,
        GROUPS,
        task.tokens_per_batch,
        advance=lambda *done: progress.append(done),
    )
    assert scores is not None
    assert module.training
    assert len(progress) > 3
    assert progress[-1][0] == progress[-1][1]
    slow = build_model(V2, reader(random_weights(V2)))
    expected = [
        [slow_score(slow, tiny_tokenizer(), text, metric) for text in pair[:2]] for pair in PAIRS
    ]
    np.testing.assert_allclose(scores[task.sides], expected, rtol=1e-5)
    # Padding to a multiple, as under sequence parallelism, changes nothing.
    padded = score_rows(module, task.rows, GROUPS, 50, multiple=4)
    np.testing.assert_allclose(padded, scores, rtol=1e-5)

    result = task.score(module, GROUPS)
    good, bad = np.array(expected).T
    names = [pair[2] for pair in PAIRS]
    assert [score.paradigm for score in result.paradigms] == [
        "anaphor", "agreement", "islands", "npi",
    ]  # fmt: skip
    for score in result.paradigms:
        own = [good[i] > bad[i] for i, name in enumerate(names) if name == score.paradigm]
        assert score.num_pairs == len(own)
        assert score.accuracy == pytest.approx(sum(own) / len(own))
    # BLiMP spells one field in two ways; a tie is wrong.
    assert list(result.fields) == ["morphology", "syntax", "syntax_semantics"]
    assert result.fields["morphology"] <= 0.5
    fields = [score.accuracy for score in result.paradigms]
    assert result.accuracy == pytest.approx(sum(fields) / 4)


def test_the_metrics_differ_in_words_of_several_pieces(tmp_path: Path) -> None:
    rows = {name: open_pairs(tmp_path, name).rows for name in ("original", "within_word_l2r")}
    mask = tiny_tokenizer().mask_id
    starts = tiny_tokenizer().word_starts()
    for number in range(rows["original"].num_rows):
        one = np.array([number])
        ids = {name: found.batch(one).inputs.input_ids[0].numpy() for name, found in rows.items()}
        begin, end = rows["original"].begins[number], rows["original"].ends[number]
        text = rows["original"].tokens[begin:end]
        place = int(rows["original"].firsts[number] - begin)
        assert np.flatnonzero(ids["original"] == mask).tolist() == [place + 1]
        end = place + 1
        while end < len(text) and not starts[text[end]]:
            end += 1
        masked = np.flatnonzero(ids["within_word_l2r"] == mask)
        assert masked.tolist() == list(range(place + 1, end + 1))


def test_an_interrupted_evaluation_has_no_result(tmp_path: Path) -> None:
    task: MinimalPairTask = open_pairs(tmp_path)
    answers = iter([False, True])
    assert task.evaluate(loss_model(), GROUPS, lambda: next(answers)) is None


def test_a_sentence_longer_than_the_model_is_an_error() -> None:
    pair = MinimalPair("word " * 200, "word", "long", "syntax")
    with pytest.raises(DataError, match="96 positions"):
        build_minimal_pairs(RunConfig(model=V2), tiny_tokenizer(), [pair])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"sentence_good": "a"}', r"pairs.jsonl:2: no 'sentence_bad'"),
        (
            '{"sentence_good": "a", "sentence_bad": " ", "UID": "x", "field": "y"}',
            r"pairs.jsonl:2: 'sentence_bad' is empty",
        ),
        (
            '{"sentence_good": "a", "sentence_bad": "b", "UID": 3, "field": "y"}',
            r"pairs.jsonl:2: 'UID' is a number, not a string",
        ),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    first = '{"sentence_good": "a", "sentence_bad": "b", "UID": "x", "field": "y"}'
    (tmp_path / "pairs.jsonl").write_text(f"{first}\n{line}\n")
    with pytest.raises(DataError, match=message):
        read_minimal_pairs(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no .jsonl or .jsonl.gz file"):
        read_minimal_pairs(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        read_minimal_pairs(tmp_path / "absent")


def test_the_limit_counts_per_paradigm(tmp_path: Path) -> None:
    lines = [
        json.dumps({"sentence_good": str(n), "sentence_bad": "b", "UID": name, "field": "y"})
        for name in "xy"
        for n in range(4)
    ]
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as stream:
        stream.write("\n".join(lines))
    found = read_minimal_pairs(tmp_path, 2)
    assert [(pair.paradigm, pair.good) for pair in found] == [
        ("x", "0"), ("x", "1"), ("y", "0"), ("y", "1"),
    ]  # fmt: skip


def test_the_published_file_is_read() -> None:
    pairs = read_minimal_pairs(corpus_path("tasks/blimp"))
    assert len(pairs) == 34_000
    assert {pair.field for pair in pairs} == {
        "morphology", "semantics", "syntax", "syntax_semantics",
    }  # fmt: skip
    assert len({pair.paradigm for pair in pairs}) == 34


def test_the_hook_needs_data_and_a_language_model() -> None:
    with pytest.raises(ConfigError, match=r"train.blimp_every=5 needs train.blimp_data"):
        validate(RunConfig(train=TrainConfig(blimp_every=5)))


def test_scores_that_are_no_numbers_are_no_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every comparison with such a score is false, so that all its pairs would count as wrong."""
    task = open_pairs(tmp_path)
    scores = np.zeros(task.rows.num_texts)
    scores[0] = np.nan
    monkeypatch.setattr(module, "score_rows", lambda *a, **b: scores)
    with pytest.raises(DataError, match=r"scores of 1 of \d+ sentences are infinite or not a n"):
        task.score(loss_model(), GROUPS)
    found = task.evaluate(loss_model(), GROUPS, lambda: False)
    assert found is not None
    assert math.isnan(found.metrics["accuracy"])
    assert "1 of" in caplog.text

"""Ensembles: means of probabilities, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_deberta.evaluate.outputs import mean_outputs
from megatron_deberta.tasks.scoring import softmax
from tests.support.labelled import encoded


def test_classes_have_the_mean_probabilities() -> None:
    data = encoded("classification", 2)
    first = np.log(np.array([[0.9, 0.1], [0.5, 0.5]], np.float32)) + 3
    second = np.log(np.array([[0.3, 0.7], [0.2, 0.8]], np.float32)) - 1
    found = mean_outputs("classification", data, [first, second])
    assert softmax(found) == pytest.approx(np.array([[0.6, 0.4], [0.35, 0.65]]))
    certain = np.array([[0, 200], [0, 0]], np.float32)
    assert np.isfinite(mean_outputs("classification", data, [certain, certain])).all()


def test_scores_are_averaged() -> None:
    data = encoded("regression", 3)
    outputs = [np.array(v, np.float32) for v in ([1, 2, 3], [3, 2, -1])]
    assert mean_outputs("regression", data, outputs).tolist() == [2, 2, 1]


def test_choices_are_normalised_per_example() -> None:
    data = encoded("choices", 2, choices=(2, 3))
    first = np.log(np.array([0.8, 0.2, 0.1, 0.1, 0.8], np.float32))
    second = np.log(np.array([0.4, 0.6, 0.5, 0.5, 0.0001], np.float32)) + 5
    found = np.exp(mean_outputs("choices", data, [first, second]))
    assert found[:2] == pytest.approx([0.6, 0.4])
    assert found[2:] == pytest.approx([0.3, 0.3, 0.4], abs=1e-3)


def test_spans_are_normalised_over_all_windows_of_an_example() -> None:
    data = encoded("spans", 3)
    random = np.random.default_rng(0)
    outputs = random.normal(size=(len(data.input_ids), 2)).astype(np.float32)
    found = mean_outputs("spans", data, [outputs])
    for example in range(data.num_examples):
        rows = data.example_offsets[example : example + 2]
        tokens = slice(*data.row_offsets[rows])
        assert np.exp(found[tokens]).sum(axis=0) == pytest.approx([1, 1], rel=1e-5)
        # A constant per example and side: the best span and the score of no answer stay.
        constant = found[tokens] - outputs[tokens]
        assert np.ptp(constant, axis=0) == pytest.approx([0, 0], abs=1e-5)


def test_tokens_are_normalised_one_by_one() -> None:
    data = encoded("tokens", 2)
    logits = np.random.default_rng(0).normal(size=(len(data.input_ids), 3)).astype(np.float32)
    found = mean_outputs("tokens", data, [logits, logits])
    assert np.exp(found) == pytest.approx(softmax(logits), rel=1e-5)

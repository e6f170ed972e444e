"""Losses of re-ranking are those of their definitions in fp64, with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_deberta.objectives import build_objective
from tests.support.labelled import encoded, labelled_rows, labelled_run

LIMIT = 1e-6
SIZES = (1, 4, 2, 7)


def bce(scores: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    each = -(labels * torch.sigmoid(scores).log() + (1 - labels) * torch.sigmoid(-scores).log())
    return each.sum(), len(labels)


def ranknet(scores: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    pairs = [
        torch.log(1 + torch.exp(-(scores[i] - scores[j])))
        for i in range(len(scores))
        for j in range(len(scores))
        if labels[i] > labels[j]
    ]
    return sum(pairs, scores.new_zeros(())), len(pairs)


def listnet(scores: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    target, found = (values.exp() / values.exp().sum() for values in (labels, scores))
    return -(target * found.log()).sum(), 1


def softmax(scores: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    if not labels.sum():
        return scores.sum() * 0, 0
    return -(labels / labels.sum() * (scores.exp() / scores.exp().sum()).log()).sum(), 1


DEFINITIONS: dict[Any, Callable[[Tensor, Tensor], tuple[Tensor, int]]] = {
    "bce": bce,
    "ranknet": ranknet,
    "listnet": listnet,
    "softmax": softmax,
}


def cases(labels: np.ndarray[Any, Any]) -> tuple[Any, Any, Tensor]:
    """Return a batch of lists with one of padding, and the scores of its rows, in fp64."""
    data = replace(encoded("rerank", 12, choices=SIZES), labels=labels.astype(np.float32))
    samples = np.array([3, 0, -1, 5, 6, 7, 8])
    batch = labelled_rows(labelled_run("rerank"), data).batch(samples, samples)
    rows = len(batch.row_index)
    scores = torch.randn(rows, 1, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return data, batch, (scores * 4).requires_grad_()


@pytest.mark.parametrize("kind", DEFINITIONS)
@pytest.mark.parametrize("grades", [2, 4])
def test_losses_and_gradients(kind: Any, grades: int) -> None:
    random = np.random.default_rng(2)
    labels = random.integers(0, grades, sum(SIZES) * 3) / (grades - 1)
    labels[SIZES[0] : SIZES[0] + SIZES[1]] = 0
    data, batch, scores = cases(labels)
    objective: Any = build_objective(labelled_run("rerank", ranking_loss=kind))
    loss, right = objective.loss(scores.float(), batch)
    (gradient,) = torch.autograd.grad(loss, scores)

    expected, targets = scores.new_zeros(()), 0
    for rows in batch.choice_rows:
        present = rows[rows >= 0]
        numbers = batch.row_index[present]
        if (numbers >= 0).all():
            truth = torch.from_numpy(data.labels[numbers.numpy()]).double()
            part, count = DEFINITIONS[kind](scores[present, 0], truth)
            expected, targets = expected + part, targets + count
    (wanted,) = torch.autograd.grad(expected, scores)
    assert objective.count_targets(batch)["task"] == targets > 0
    assert loss.item() == pytest.approx(expected.item(), rel=LIMIT)
    torch.testing.assert_close(gradient, wanted, rtol=LIMIT, atol=LIMIT)
    assert 0 <= right <= targets


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_unlabelled_queries_do_not_count(kind: Any) -> None:
    _, batch, scores = cases(np.full(sum(SIZES) * 3, math.nan))
    objective: Any = build_objective(labelled_run("rerank", ranking_loss=kind, sift=5.0))
    loss, right = objective.loss(scores, batch)
    loss.backward()
    assert (loss.item(), int(right)) == (0, 0)
    assert scores.grad is not None
    assert not scores.grad.any()
    assert set(map(int, objective.count_targets(batch).values())) == {0}


@pytest.mark.parametrize(("kind", "right"), [("bce", 3), ("ranknet", 3), ("listnet", 1)])
def test_right_predictions(kind: Any, right: int) -> None:
    """Of four passages with relevance 1, 1, 0, 0, the third has too high a score."""
    data = replace(encoded("rerank", 1, choices=(4,)), labels=np.float32([1, 1, 0, 0]))
    batch = labelled_rows(labelled_run("rerank"), data).batch(*[np.array([0])] * 2)
    objective: Any = build_objective(labelled_run("rerank", ranking_loss=kind))
    scores = torch.tensor([3.0, 1.0, 2.0, -1.0]).unsqueeze(-1)
    assert objective.loss(scores, batch)[1] == right

"""Losses of classes and labels compared with torch's and their definition, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.labelled import LabelledObjective
from tests.support.labelled import labelled_run

WEIGHTS = ("0.25", "3", "0.5")
GENERATOR = torch.Generator().manual_seed(3)
LOGITS = torch.randn(12, 3, generator=GENERATOR) * 4
CLASSES = torch.tensor([0, 1, 2, -100, 1, 0, 2, 2, 1, -100, 0, 0])
LABELS = torch.randint(0, 2, (12, 3), generator=GENERATOR)
LABELS[4] = -100


def objective(head: Any, weights: tuple[str, ...], gamma: float) -> LabelledObjective:
    found = build_objective(labelled_run(head, class_weights=weights, focal_gamma=gamma))
    assert isinstance(found, LabelledObjective)
    return found


def batch(labels: Tensor) -> TaskBatch:
    ids = torch.ones(len(labels), 2, dtype=torch.int64)
    numbers = torch.arange(len(labels))
    return TaskBatch(ModelInputs(ids, ids.bool()), labels, numbers, numbers)


def mean_loss(
    head: Any, logits: Tensor, labels: Tensor, weights: tuple[str, ...], gamma: float
) -> Tensor:
    """Return the loss of two micro batches that one step would have."""
    task = objective(head, weights, gamma)
    parts = list(zip(logits.split([5, 7]), map(batch, labels.split([5, 7])), strict=True))
    targets = sum(task.count_targets(part)["task"] for _, part in parts)
    return sum(task.loss(part, each)[0] for part, each in parts) / targets  # type: ignore[return-value]


def reference(head: str, logits: Tensor, labels: Tensor, weights: Any, gamma: float) -> Tensor:
    """Return the loss by its definition, in fp64."""
    vector = None if not weights else torch.tensor([float(each) for each in weights]).double()
    if head == "multilabel":
        known = labels[:, 0] >= 0
        logits, labels = logits[known], labels[known].double()
        if not gamma:
            return nn.BCEWithLogitsLoss(pos_weight=vector)(logits, labels)
        p = logits.sigmoid()
        factors = torch.ones(3).double() if vector is None else vector
        positive = -factors * (1 - p) ** gamma * p.log() * labels
        return (positive - p**gamma * (1 - p).log() * (1 - labels)).mean()
    if not gamma:
        return F.cross_entropy(logits, labels, vector)
    known = labels >= 0
    p = logits[known].softmax(-1).gather(-1, labels[known, None])[:, 0]
    factors = torch.ones_like(p) if vector is None else vector[labels[known]]
    return (-factors * (1 - p) ** gamma * p.log()).sum() / factors.sum()


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("weights", [(), WEIGHTS])
@pytest.mark.parametrize("head", ["classification", "multilabel", "tokens"])
def test_loss_and_gradient(head: str, weights: tuple[str, ...], gamma: float) -> None:
    labels = LABELS if head == "multilabel" else CLASSES
    ours = LOGITS.clone().requires_grad_()
    exact = LOGITS.double().requires_grad_()
    found = mean_loss(head, ours, labels, weights, gamma)
    expected = reference(head, exact, labels, weights, gamma)
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    (gradient,) = torch.autograd.grad(found, ours)
    (wanted,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", ["classification", "multilabel"])
@pytest.mark.parametrize("scale", [1e-3, 200.0])
def test_focal_losses_of_extreme_logits_have_finite_gradients(head: str, scale: float) -> None:
    labels = LABELS if head == "multilabel" else CLASSES
    logits = (LOGITS * scale).requires_grad_()
    loss = mean_loss(head, logits, labels, WEIGHTS, 0.5)
    loss.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_a_step_without_labels_has_no_loss_and_no_targets() -> None:
    for head, labels in (("classification", CLASSES[:1]), ("multilabel", LABELS[:1])):
        task = objective(head, WEIGHTS, 2.0)
        hidden = batch(torch.full_like(labels, -100))
        loss, correct = task.loss(LOGITS[:1], hidden)
        assert [loss.item(), correct.item()] == [0, 0]
        assert task.count_targets(hidden)["task"].item() == 0


def test_accuracy_is_weighted_as_the_loss() -> None:
    task = objective("classification", WEIGHTS, 0.0)
    found = task.loss(LOGITS, batch(CLASSES))[1]
    right = [float(WEIGHTS[c]) for c, row in zip(CLASSES, LOGITS, strict=True) if row.argmax() == c]
    assert found.item() == pytest.approx(sum(right))


def test_only_the_loss_of_classes_is_weighted() -> None:
    """SiFT's divergence counts every target once; both counts are of one type."""
    run = labelled_run("tokens", sift=1.0, class_weights=WEIGHTS)
    task = build_objective(run)
    found = task.count_targets(batch(CLASSES))
    assert found["task"].item() == pytest.approx(4 * 0.25 + 3 * 3 + 3 * 0.5)
    assert found["sift"].item() == 10
    assert torch.stack([*found.values()]).dtype == torch.float64

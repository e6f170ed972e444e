"""SiFT compared with a restatement on transformers' models, with a hook as in the release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.checkpoint.store import local_part
from megatron_deberta.config.schema import Head
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.model import DropoutSeeds
from megatron_deberta.objectives import sift
from tests.parity.test_heads_vs_transformers import GROUPS, stock_model
from tests.support.labelled import HEADS, labelled_run, labelled_steps
from tests.support.stock_weights import stock_name

# Larger than in training, where the divergence is close to rounding errors
NOISE, STEP = 0.3, 0.1


class Restated:
    """The release's perturbation layer before ``embeddings.LayerNorm``, written again."""

    def __init__(self, model: Any, logits: Callable[[], list[Tensor]]) -> None:
        self.logits = logits
        self.perturbation: Tensor | None = None
        self.clean: Tensor | None = None
        model.deberta.embeddings.LayerNorm.register_forward_pre_hook(self.hook)

    def hook(self, module: Any, inputs: tuple[Tensor]) -> Tensor:
        mean = inputs[0].mean(-1, keepdim=True)
        variance = inputs[0].var(-1, correction=0, keepdim=True)
        normalised = (inputs[0] - mean) / (variance + 1e-7).sqrt()
        if self.perturbation is None:
            self.clean = normalised
            return normalised
        assert self.clean is not None
        return self.clean.detach() + self.perturbation

    def loss(
        self, noise: Tensor, scored: Tensor, is_score: bool, inner_kind: str, clean_gradient: bool
    ) -> Tensor:
        """Return the sum of the outer divergences."""

        def divergence(p: list[Tensor], q: list[Tensor], kind: str = "symmetric_kl") -> Tensor:
            total = p[0].new_zeros(())
            for row_p, row_q in zip(p, q, strict=True):
                if is_score:
                    each = (row_p - row_q).pow(2)[:, 0]
                elif kind == "kl":
                    # Up to the entropy of the target, which has no gradient.
                    each = F.cross_entropy(row_p, row_q.detach().softmax(-1), reduction="none")
                else:
                    a, b = row_p.log_softmax(-1), row_q.log_softmax(-1)
                    each = F.kl_div(a, b.detach(), reduction="none", log_target=True).sum(-1)
                    each = each - (b.detach().exp() * b.detach()).sum(-1)
                    each = each - (a.detach().exp() * b).sum(-1)
                total = total + each[scored].sum()
            return total / len(p)

        clean = self.logits()
        self.perturbation = noise.clone().requires_grad_()
        detached = [part.detach() for part in clean]
        inner = divergence(self.logits(), detached, inner_kind)
        (gradient,) = torch.autograd.grad(inner, self.perturbation)
        largest = gradient.abs().max(-1, keepdim=True).values
        self.perturbation = (noise + STEP * gradient / (1e-6 + largest)).detach()
        outer = divergence(self.logits(), clean if clean_gradient else detached)
        self.perturbation = None
        return outer


def stock_logits(model: Any, head: Head, batch: TaskBatch) -> list[Tensor]:
    """Return the predicted distributions of a micro batch."""
    ids, mask = batch.inputs.input_ids, batch.inputs.is_token
    if head == "choices":
        assert batch.choice_rows is not None
        rows = batch.choice_rows.clamp(min=0)
        logits = model(input_ids=ids[rows], attention_mask=mask[rows].long()).logits
        return [logits.masked_fill(batch.choice_rows < 0, -1e9)]
    out = model(input_ids=ids, attention_mask=mask.long())
    if head == "rerank":
        assert batch.choice_rows is not None
        scores = out.logits[batch.choice_rows.clamp(min=0), 0]
        return [scores.masked_fill(batch.choice_rows < 0, -1e9)]
    if head == "spans":
        return [side.masked_fill(~mask, -1e9) for side in (out.start_logits, out.end_logits)]
    if head == "multilabel":
        sides = torch.stack([torch.zeros_like(out.logits), out.logits], -1)
        return list(sides.unbind(1))
    return [out.logits.flatten(0, -2)]


@pytest.mark.parametrize(
    ("head", "inner", "clean_gradient"),
    [
        *((head, "symmetric_kl", True) for head in HEADS),
        ("classification", "kl", True),
        ("tokens", "kl", False),
        ("spans", "symmetric_kl", False),
        ("regression", "symmetric_kl", False),
    ],
)
def test_loss_and_gradients(
    head: Head, inner: Any, clean_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = labelled_run(head, sift=5.0)
    objective = replace(
        config.objective, sift_step=STEP, sift_inner=inner, sift_clean_gradient=clean_gradient
    )
    config = replace(config, objective=objective)
    ((batch, *_), *_) = labelled_steps(config, GROUPS)
    stock = stock_model(config)
    model: Any = build_model(config, GROUPS).module.train()
    specs = build_model(config, GROUPS).specs
    weights = dict(stock.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(local_part(weights[stock_name(name) or name], specs[name]))
    rows, length = batch.inputs.input_ids.shape
    noise = torch.randn(rows, length, 32, generator=torch.Generator().manual_seed(3)) * NOISE
    monkeypatch.setattr(sift, "initial_noise", lambda *_: noise.clone())

    result = model(batch, DropoutSeeds(1, 0, batch.dropout_keys)).losses["sift"].loss
    result.backward()

    scored = model.objective.scored(batch)
    theirs = noise
    if head == "choices":
        # transformers' input has rows for missing choices, too.
        assert batch.choice_rows is not None
        theirs = noise[batch.choice_rows.clamp(min=0)].flatten(0, 1)
    restated = Restated(stock, lambda: stock_logits(stock, head, batch))
    expected = restated.loss(theirs, scored, head == "regression", inner, clean_gradient)
    expected.backward()

    assert result.item() == pytest.approx(expected.item(), rel=1e-5)
    assert result.item() > 0
    for name, parameter in model.named_parameters():
        other = weights[stock_name(name) or name].grad
        if other is None:
            continue
        actual = parameter.grad[: len(other)]
        assert (actual - other).norm() <= 1e-4 * other.norm() + 1e-6, name


def test_noise_is_a_function_of_row_and_position_and_is_cut_off() -> None:
    seeds = DropoutSeeds(1, 0, torch.tensor([4, 9]))
    positions = torch.arange(40).expand(2, 40)
    noise = sift.initial_noise(0.01, seeds, positions, 64)
    assert noise.abs().max() == pytest.approx(0.02)
    assert noise.std() == pytest.approx(0.00955, rel=0.05)
    other = sift.initial_noise(0.01, DropoutSeeds(1, 0, torch.tensor([9])), positions[:1, 7:], 64)
    torch.testing.assert_close(noise[1:, 7:], other, rtol=0, atol=0)


def test_no_gradient_reaches_the_embeddings_through_the_perturbed_pass() -> None:
    config = labelled_run("classification", sift=5.0)
    ((batch, *_), *_) = labelled_steps(config, GROUPS)
    model: Any = build_model(config, GROUPS).module.train()
    model.sift = sift.Sift(0.01, 1e-4, "symmetric_kl", clean_gradient=False)
    model(batch, DropoutSeeds(1, 0, batch.dropout_keys)).losses["sift"].loss.backward()
    assert model.embeddings.token.weight.grad is None
    assert model.classifier.weight.grad.norm() > 0

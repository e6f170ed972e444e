"""The kernels of the vocabulary's cross-entropy against its eager twin in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.ops import cross_entropy
from megatron_deberta.ops.cross_entropy import (
    IGNORED_LABEL,
    Vocabulary,
    linear_cross_entropy,
)

pytest.importorskip("triton", reason="the fused kernels are written in Triton")
from megatron_deberta.ops.triton import cross_entropy as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTH = 8
EPSILON = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def kernels_and_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "runs_kernels", lambda x: x.dtype in DTYPES)
    monkeypatch.setattr(kernels, "COLUMNS", 16)
    monkeypatch.setattr(kernels, "GRADIENT_TILE", (4, 16))


def logits_of(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits and labels: ties, ignored labels, logits far from zero."""
    generator = torch.Generator().manual_seed(rows * columns)
    logits = 3 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    labels = torch.randint(columns, (rows,), generator=generator)
    logits[0] += 1000
    logits[-1] -= 1000
    if rows > 4:
        logits[1, 0] = logits[1, columns - 1] = 20.0
        logits[2, 0] = logits[2, columns - 1] = 20.0
        labels[1], labels[2], labels[3] = 0, columns - 1, IGNORED_LABEL
    return logits.to(dtype).to(DEVICE), labels.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns", "padding"), [(7, 50, 6), (5, 16, 0), (1, 1, 3)])
def test_statistics_and_gradient(rows: int, columns: int, padding: int, dtype: torch.dtype) -> None:
    logits, labels = logits_of(rows, columns, dtype)
    wide = torch.cat([logits, torch.full((rows, padding), 30000.0).to(logits)], dim=1)
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact, labels, reduction="none", ignore_index=IGNORED_LABEL)
    (gradient,) = torch.autograd.grad(loss.sum(), exact)
    top, total, target, hit = kernels.row_statistics(wide, labels, 0, columns)
    assert torch.equal(top, logits.float().max(1).values)
    counted = labels != IGNORED_LABEL
    losses = torch.where(counted, total.log() - (target - top), 0)
    torch.testing.assert_close(losses.double(), loss.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(hit > 0, logits.float().argmax(1) == labels)
    d_bias = torch.full((columns + padding,), 2.0, device=DEVICE)
    kernels.write_gradient_(wide, labels, top, total, d_bias, 0, columns, IGNORED_LABEL, 4.0)
    assert (wide[:, :columns].double() / 4 - gradient).norm() <= EPSILON[dtype] * (
        gradient.norm() + 1e-3
    )
    assert not wide[:, columns:].any()
    expected = F.pad(gradient.sum(0), (0, padding)) + 2
    torch.testing.assert_close(d_bias.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_reach_the_loss(value: float) -> None:
    logits, labels = logits_of(5, 40, torch.float32)
    logits[2, 33] = value
    top, total, target, _ = kernels.row_statistics(logits, labels, 0, 40)
    losses = total.log() - (target - top)
    assert losses.isfinite().tolist() == [True, True, False, True, True]


def inputs(dtype: torch.dtype, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((11, WIDTH), (vocab_size + 3, WIDTH), (vocab_size + 3,))
    states, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)
        for shape in shapes
    )
    return states.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [45 * 4, 2**20])
def test_loss_and_gradients_are_those_of_the_twin(
    dtype: torch.dtype, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over chunks; in 16 bits the error may be the twin's."""
    for device in ("cpu", "cuda", "fused"):
        monkeypatch.setitem(cross_entropy._CHUNK_ELEMENTS, device, elements)
    labels = torch.arange(11, device=DEVICE) * 3
    labels[4] = IGNORED_LABEL
    results = []
    for fuse, of in ((True, dtype), (False, dtype), (False, torch.float64)):
        tensors = tuple(t.detach().to(of).requires_grad_() for t in inputs(dtype, 42))
        loss, right, _ = linear_cross_entropy(*tensors, labels, Vocabulary(42, fuse=fuse))
        (0.7 * loss).backward()
        results.append((loss.detach(), right, [t.grad for t in tensors]))
    (loss, right, gradients), (_, hits, twin), (exact_loss, _, exact) = results
    assert right == hits
    assert float(loss) == pytest.approx(float(exact_loss), rel=EPSILON[dtype])
    for one, other, true in zip(gradients, twin, exact, strict=True):
        assert one is not None
        assert other is not None
        assert true is not None
        errors = [float((t.double() - true).norm() / true.norm()) for t in (one, other)]
        assert one.dtype == dtype
        # The interpreter truncates to bfloat16, which a GPU rounds to.
        slack = 1.5 if dtype == torch.bfloat16 and DEVICE == "cpu" else 1.1
        assert errors[0] <= slack * errors[1] + 1e-6


def test_losses_of_tokens_and_samples() -> None:
    labels = torch.arange(11, device=DEVICE)
    states, weight, bias = inputs(torch.float32, 42)
    found, twin = (
        linear_cross_entropy(
            states, weight, bias, labels, Vocabulary(42, fuse=fuse), reduction="none"
        )
        for fuse in (True, False)
    )
    torch.testing.assert_close(found.loss, twin.loss, rtol=1e-5, atol=1e-6)
    assert found.correct == twin.correct
    found, twin = (
        linear_cross_entropy(
            states, weight, bias, labels, Vocabulary(42, fuse=fuse),
            draw=lambda z, rows, first: z.max(1),
        )
        for fuse in (True, False)
    )  # fmt: skip
    torch.testing.assert_close(found.loss, twin.loss)
    assert found.samples is not None
    assert torch.equal(found.samples, torch.as_tensor(twin.samples))


def test_float64_takes_the_twin() -> None:
    tensors = tuple(t.detach().double() for t in inputs(torch.float32, 42))
    labels = torch.arange(11, device=DEVICE)
    fused, eager = (
        linear_cross_entropy(*tensors, labels, Vocabulary(42, fuse=fuse)).loss
        for fuse in (True, False)
    )
    assert torch.equal(fused, eager)

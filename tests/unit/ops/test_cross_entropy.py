"""Cross-entropy of the vocabulary projection on one device: gradient, chunks, memory, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_deberta.model.heads import TokenLoss
from megatron_deberta.model.sampling import GumbelMax
from megatron_deberta.ops import cross_entropy
from megatron_deberta.ops.cross_entropy import Vocabulary, linear_cross_entropy
from tests.support.losses import PlainTokenLoss
from tests.support.memory import LargestTensor

Inputs = tuple[Tensor, Tensor, Tensor]


def inputs(tokens: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, 8), (vocab_size, 8), (vocab_size,))
    states, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    )
    return states, weight, bias


class Fresh(torch.autograd.Function):
    """The loss, differentiated anew whenever backward is asked for: gradcheck asks twice."""

    @staticmethod
    def forward(ctx: Any, labels: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(labels, *tensors)
        return linear_cross_entropy(*tensors, labels, Vocabulary(7))[0]  # type: ignore[call-arg, misc]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        labels, *tensors = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in tensors]
            loss, *_ = linear_cross_entropy(*leaves, labels, Vocabulary(7))
            return (None, *torch.autograd.grad(loss, leaves, grads[0]))


def test_labels_are_subtracted_by_comparison_as_by_scatter() -> None:
    columns, counted = torch.tensor([0, 4, 2, 2, 0]), torch.tensor([True, True, True, True, False])
    results = [torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    for x, scatters in zip(results, (False, True), strict=True):
        cross_entropy._subtract_labels(x, columns, counted, scatters=scatters)
    assert torch.equal(*results)
    assert (results[0] < 0).sum() == counted.sum()


@pytest.mark.parametrize("rows_at_a_time", [2, 100])
def test_gradcheck(monkeypatch: pytest.MonkeyPatch, rows_at_a_time: int) -> None:
    monkeypatch.setitem(cross_entropy._CHUNK_ELEMENTS, "cpu", 9 * rows_at_a_time)
    labels = torch.tensor([0, 6, -100, 3, 3])
    # Two of nine rows are padding.
    assert torch.autograd.gradcheck(
        lambda *tensors: Fresh.apply(labels, *tensors), inputs(5, 9, torch.float64)
    )


def test_chunks_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.randint(33, (50,), generator=torch.Generator().manual_seed(1))
    results = []
    for elements in (33 * 3, 2**18):
        monkeypatch.setitem(cross_entropy._CHUNK_ELEMENTS, "cpu", elements)
        tensors = inputs(50, 33)
        loss, right, _ = linear_cross_entropy(*tensors, labels, Vocabulary(33))
        (loss / 50).backward()
        results.append((loss.detach(), right, *(t.grad for t in tensors)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_gradients_are_as_good_as_eager(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    vocab_size, labels = 4096, torch.arange(48) * 7
    monkeypatch.setitem(cross_entropy._CHUNK_ELEMENTS, "cpu", 16 * vocab_size)
    exact = [t.detach().double().requires_grad_() for t in inputs(48, vocab_size, dtype)]
    logits = functional.linear(*exact)
    (1.7 * functional.cross_entropy(logits, labels, reduction="sum")).backward()
    errors = []
    for ours in (True, False):
        tensors = inputs(48, vocab_size, dtype)
        if ours:
            loss, *_ = linear_cross_entropy(*tensors, labels, Vocabulary(vocab_size))
            assert loss.dtype == torch.float32
        else:
            eager = functional.linear(*tensors).float()
            loss = functional.cross_entropy(eager, labels, reduction="sum")
        (loss * 1.7).backward()
        errors.append(
            [
                float((t.grad.double() - e.grad).norm() / e.grad.norm())  # type: ignore[union-attr]
                for t, e in zip(tensors, exact, strict=True)
            ]
        )
    for mine, eager_error in zip(*errors, strict=True):
        assert mine <= 1.25 * eager_error


def test_all_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cross_entropy._CHUNK_ELEMENTS, "cpu", 1000)
    tensors, labels = inputs(300, 50), torch.zeros(300, dtype=torch.int64)
    with LargestTensor() as largest:
        loss, *_ = linear_cross_entropy(*tensors, labels, Vocabulary(50))
        loss.backward()
    # States are the largest thing there is; logits would be 15,000.
    assert largest.elements == 300 * 8


def test_a_loss_scale_keeps_small_fp16_gradients() -> None:
    labels, found = torch.arange(48) * 7, []
    for dtype, scale in ((torch.float64, 1.0), (torch.float16, 2.0**10)):
        tensors = [t.detach().to(dtype).requires_grad_() for t in inputs(48, 512, torch.float16)]
        loss, *_ = linear_cross_entropy(*tensors, labels, Vocabulary(512))  # type: ignore[call-arg]
        (loss * 1e-6 * scale).backward()
        found.append([t.grad.double() / scale for t in tensors])  # type: ignore[union-attr]
    for exact, scaled in zip(*found, strict=True):
        assert (scaled - exact).norm() / exact.norm() < 3e-3


def test_without_gradients_none_are_computed() -> None:
    tensors, labels = inputs(6, 50), torch.arange(6)
    with torch.no_grad(), LargestTensor() as largest:
        loss, right, _ = linear_cross_entropy(*tensors, labels, Vocabulary(50))
    logits = functional.linear(*tensors)
    torch.testing.assert_close(loss, functional.cross_entropy(logits, labels, reduction="sum"))
    assert right == (logits.argmax(1) == labels).sum()
    assert largest.elements == 50 * 8  # the weight, transposed; no gradient of it in fp32
    assert not loss.requires_grad


def test_a_second_backward_is_refused() -> None:
    loss, *_ = linear_cross_entropy(*inputs(3, 5), torch.tensor([1, 2, 0]), Vocabulary(5))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="called twice"):
        loss.backward()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_logit_shows_in_the_loss(bad: float) -> None:
    states, weight, bias = inputs(3, 5)
    bias.data[4] = bad
    loss, *_ = linear_cross_entropy(states, weight, bias, torch.tensor([1, 1, 1]), Vocabulary(5))
    assert not torch.isfinite(loss)


@pytest.mark.parametrize("label", [5, -1, 6])
def test_label_outside_the_vocabulary_is_refused(label: int) -> None:
    with pytest.raises(ValueError, match=rf"label {label} .*vocab_size=5"):
        linear_cross_entropy(*inputs(1, 8), torch.tensor([label]), Vocabulary(5))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_loss_samples_and_gradients_are_those_of_the_twin(reduction: Any) -> None:
    labels = torch.tensor([3, -100, 49, 7, 7, 0])
    draw = GumbelMax(torch.arange(6, dtype=torch.int32))
    results = []
    for loss_of in (TokenLoss(50), PlainTokenLoss()):
        tensors = inputs(6, 50)
        found = loss_of(*tensors, labels, reduction=reduction, draw=draw)
        gradients: tuple[Tensor, ...] = ()
        if reduction == "sum":
            gradients = torch.autograd.grad(1.3 * found.loss, tensors)
        results.append((found.loss.detach(), found.correct, found.samples, *gradients))
    for own, twin in zip(*results, strict=True):
        torch.testing.assert_close(own, twin, rtol=1e-5, atol=1e-6)

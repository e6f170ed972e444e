"""The vocabulary loss on one device: gradient, blocks, memory, refusals."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megatron_deberta.parallel import vocab
from megatron_deberta.parallel.vocab import vocab_parallel_cross_entropy


def test_gradcheck() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 6, -100, 3, 3])
    assert torch.autograd.gradcheck(
        lambda z: vocab_parallel_cross_entropy(z, labels, 0, 6 + 1, None)[0], (logits,)
    )


def test_many_blocks_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 33)
    labels = torch.randint(33, (50,))
    results = []
    for elements in (33 * 3, 2**18):
        monkeypatch.setitem(vocab._BLOCK_ELEMENTS, "cpu", elements)
        z = logits.clone().requires_grad_()
        loss, correct = vocab_parallel_cross_entropy(z, labels, 0, 33, None)
        loss.mean().backward()
        results.append((loss.detach(), correct, z.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_equal_to_torch_in_half_precision_logits() -> None:
    logits = (4 * torch.randn(20, 64)).half()
    labels = torch.randint(64, (20,))
    loss, _ = vocab_parallel_cross_entropy(logits, labels, 0, 64, None)
    expected = functional.cross_entropy(logits.double(), labels, reduction="none")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_logit_shows_in_the_loss(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 4] = bad
    loss, _ = vocab_parallel_cross_entropy(logits, torch.tensor([1, 1, 1]), 0, 5, None)
    assert torch.isfinite(loss).tolist() == [True, False, True]


@pytest.mark.parametrize("label", [5, -1, 6])
def test_label_outside_the_vocabulary_is_refused(label: int) -> None:
    with pytest.raises(ValueError, match=rf"label {label} .*vocab_size=5"):
        vocab_parallel_cross_entropy(torch.zeros(1, 8), torch.tensor([label]), 0, 5, None)

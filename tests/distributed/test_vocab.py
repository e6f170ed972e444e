"""Vocabulary-parallel embedding and loss against torch's own on the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_deberta.parallel.vocab import (
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from tests.support.ranks import RankPool, grid

PADDED, TOKENS, WIDTH = 16, 10, 6


def _random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _ids(shape: tuple[int, ...], vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(5))


def run_embedding(rank: int, tp: int, sequence: bool) -> tuple[Tensor, Tensor]:
    groups = grid(tp)
    rows = PADDED // tp
    table = _random((PADDED, WIDTH), 1)[groups.tp_rank * rows :][:rows].clone().requires_grad_()
    y = vocab_parallel_embedding(
        _ids((2, 8), PADDED), table, groups.tp_rank * rows, groups.tp_group, sequence=sequence
    )
    weights = _random((2, 8, WIDTH), 2)
    if sequence:
        weights = weights.chunk(tp, dim=1)[groups.tp_rank]
    (y * weights).sum().backward()
    assert table.grad is not None
    return y.detach(), table.grad


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_embedding_equals_one_process(four_ranks: RankPool, tp: int, sequence: bool) -> None:
    table = _random((PADDED, WIDTH), 1).requires_grad_()
    y = functional.embedding(_ids((2, 8), PADDED), table)
    (y * _random((2, 8, WIDTH), 2)).sum().backward()
    assert table.grad is not None
    for rank, (local, grad) in enumerate(four_ranks.run(run_embedding, tp, sequence)):
        expected = y.chunk(tp, dim=1)[rank % tp] if sequence else y
        assert torch.equal(local, expected)
        torch.testing.assert_close(grad, table.grad.chunk(tp)[rank % tp], rtol=1e-14, atol=1e-14)


def _logits(dtype: torch.dtype) -> Tensor:
    logits = 3 * _random((TOKENS, PADDED), 3)
    logits[0, 2] = logits[0, 9] = 50.0  # a tie across ranks: index 2 wins
    logits[1, 11] = logits[1, 3] = 50.0
    logits[2] -= 1e4  # far from zero: needs the maximum taken out
    logits[3] += 3e4
    return logits.to(dtype)


def _labels(vocab_size: int) -> Tensor:
    labels = _ids((TOKENS,), vocab_size)
    labels[0], labels[1], labels[4], labels[7] = 2, min(11, vocab_size - 1), -100, -100
    return labels


def run_loss(
    rank: int, tp: int, vocab_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    groups = grid(tp)
    columns = PADDED // tp
    logits = _logits(dtype)
    logits[:, vocab_size:] = 60000.0  # padding columns must not count, however large
    local = logits.chunk(tp, dim=1)[groups.tp_rank].clone().requires_grad_()
    loss, correct = vocab_parallel_cross_entropy(
        local, _labels(vocab_size), groups.tp_rank * columns, vocab_size, groups.tp_group
    )
    (loss * _random((TOKENS,), 4, loss.dtype)).sum().backward()
    assert local.grad is not None
    assert local.grad.dtype == dtype
    return loss.detach(), correct, local.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [16, 13, 7])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_loss_equals_torch(
    four_ranks: RankPool, tp: int, vocab_size: int, dtype: torch.dtype
) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    logits = _logits(dtype)[:, :vocab_size].clone().to(torch.float64).requires_grad_()
    labels = _labels(vocab_size)
    expected = functional.cross_entropy(logits, labels, reduction="none")
    (expected * _random((TOKENS,), 4, wide)).sum().backward()
    assert logits.grad is not None
    hit = logits.argmax(dim=1) == labels
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for rank, (loss, correct, grad) in enumerate(four_ranks.run(run_loss, tp, vocab_size, dtype)):
        assert loss.dtype == wide
        # The loss is made in fp32 whatever the logits are.
        torch.testing.assert_close(
            loss.double(), expected.detach(), rtol=min(tolerance, 1e-5), atol=min(tolerance, 1e-5)
        )
        assert torch.equal(correct, hit)
        assert bool(correct[0])
        padded = torch.zeros(TOKENS, PADDED, dtype=torch.float64)
        padded[:, :vocab_size] = logits.grad
        torch.testing.assert_close(
            grad.double(), padded.chunk(tp, dim=1)[rank % tp], rtol=tolerance, atol=tolerance
        )


def run_no_tokens(rank: int) -> tuple[list[int], list[int]]:
    groups = grid(2)
    logits = torch.zeros(0, 4, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.int64)
    loss, _ = vocab_parallel_cross_entropy(logits, labels, 4 * rank, 8, groups.tp_group)
    loss.sum().backward()
    assert logits.grad is not None
    return list(loss.shape), list(logits.grad.shape)


def test_a_batch_without_predictions(two_ranks: RankPool) -> None:
    assert two_ranks.run(run_no_tokens) == [([0], [0, 4])] * 2

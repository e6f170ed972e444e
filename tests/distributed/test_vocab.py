"""Vocabulary-parallel embedding and loss compared with torch on the whole vocabulary."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_deberta.distributed.collectives import copy_to_tensor_parallel_region
from megatron_deberta.distributed.parallelize.apply import vocab_parallel_embedding, vocabulary_part
from megatron_deberta.evaluate.validation_samples import best_tokens
from megatron_deberta.ops import cross_entropy
from megatron_deberta.ops.cross_entropy import linear_cross_entropy
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


def _logits() -> Tensor:
    logits = 3 * _random((TOKENS, PADDED), 3)
    logits[0, 2] = logits[0, 9] = 50.0  # a tie across ranks: index 2 wins
    logits[1, 11] = logits[1, 3] = 50.0
    logits[2] -= 100  # Far from zero, which needs the subtraction of the maximum.
    logits[3] += 100  # Exp overflows in fp32.
    return logits


def _labels(vocab_size: int) -> Tensor:
    labels = _ids((TOKENS,), vocab_size)
    labels[0], labels[1], labels[4], labels[7] = 2, min(11, vocab_size - 1), -100, -100
    return labels


def _projection(vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return states, weight and bias whose first logits are those above; padding rows are zero."""
    states = torch.cat([_logits(), _random((TOKENS, WIDTH), 6)], dim=1)
    weight = torch.cat([torch.eye(PADDED), 0.1 * _random((PADDED, WIDTH), 7)], dim=1)
    bias = 0.1 * _random((PADDED,), 8)
    bias[[3, 9, 11, 2]] = 0.0
    weight[[3, 9, 11, 2], PADDED:] = 0.0
    weight[vocab_size:], bias[vocab_size:] = 0.0, 60000.0  # Padding must not be counted.
    return states.to(dtype), weight.to(dtype), bias.to(dtype)


def run_loss(
    rank: int, tp: int, vocab_size: int, dtype: torch.dtype, fuse: bool = False
) -> tuple[Tensor, ...]:
    with mock.patch.object(cross_entropy, "runs_kernels", return_value=fuse):
        return _loss(tp, vocab_size, dtype, fuse)


def _loss(tp: int, vocab_size: int, dtype: torch.dtype, fuse: bool) -> tuple[Tensor, ...]:
    groups = grid(tp)
    start = groups.tp_rank * (PADDED // tp)
    states, weight, bias = _projection(vocab_size, dtype)
    inputs = [states, *(t[start : start + PADDED // tp].clone() for t in (weight, bias))]
    for tensor in inputs:
        tensor.requires_grad_()
    cross_entropy._CHUNK_ELEMENTS["cpu"] = 4 * (PADDED // tp)
    whole = copy_to_tensor_parallel_region(inputs[0], groups.tp_group)
    part = vocabulary_part(vocab_size, start, groups.tp_group, fuse=fuse)
    loss, right, _ = linear_cross_entropy(whole, *inputs[1:], _labels(vocab_size), part)
    (0.7 * loss).backward()
    assert all(t.grad is not None and t.grad.dtype == dtype for t in inputs)
    return loss.detach(), right, *(t.grad for t in inputs if t.grad is not None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [16, 13, 7])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_loss_equals_torch(
    four_ranks: RankPool, tp: int, vocab_size: int, dtype: torch.dtype
) -> None:
    check_loss(four_ranks, tp, vocab_size, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tp", "vocab_size"), [(2, 16), (4, 13), (4, 7)])
def test_loss_of_the_kernels_equals_torch(
    four_ranks: RankPool, tp: int, vocab_size: int, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    check_loss(four_ranks, tp, vocab_size, dtype, fuse=True)


def check_loss(
    four_ranks: RankPool, tp: int, vocab_size: int, dtype: torch.dtype, *, fuse: bool = False
) -> None:
    exact = [t.double().requires_grad_() for t in _projection(vocab_size, dtype)]
    logits = functional.linear(*exact).to(dtype)  # Rounded like the product.
    labels = _labels(vocab_size)
    expected = functional.cross_entropy(logits.double()[:, :vocab_size], labels, reduction="sum")
    (0.7 * expected).backward()
    hits = (logits[:, :vocab_size].argmax(dim=1) == labels).sum()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for rank, found in enumerate(four_ranks.run(run_loss, tp, vocab_size, dtype, fuse)):
        loss, right, *gradients = found
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        # The loss is computed in fp32 for all dtypes.
        assert float(loss) == pytest.approx(expected.item(), rel=min(tolerance, 1e-5))
        assert right == hits
        for gradient, source in zip(gradients, exact, strict=True):
            assert source.grad is not None
            own = source.grad
            if gradient.shape != own.shape:
                own = own.chunk(tp)[rank % tp]
            error = (gradient.double() - own).norm() / source.grad.norm()
            assert error <= tolerance


def run_no_tokens(rank: int) -> tuple[float, list[int]]:
    groups = grid(2)
    states, weight, bias = torch.zeros(0, 3), torch.ones(4, 3), torch.ones(4)
    weight.requires_grad_()
    labels = torch.zeros(0, dtype=torch.int64)
    part = vocabulary_part(8, 4 * rank, groups.tp_group)
    loss = linear_cross_entropy(states, weight, bias, labels, part).loss
    loss.backward()
    assert weight.grad is not None
    return float(loss), weight.grad.tolist()


def test_batch_without_predictions(two_ranks: RankPool) -> None:
    assert two_ranks.run(run_no_tokens) == [(0.0, [[0.0] * 3] * 4)] * 2


def run_best_tokens(rank: int) -> tuple[Tensor, Tensor]:
    groups = grid(4)
    columns = PADDED // 4
    start = groups.tp_rank * columns
    return best_tokens(_logits()[:, start:][:, :columns].clone(), start, 13, groups.tp_group)


def test_most_probable_tokens_equal_one_process(four_ranks: RankPool) -> None:
    ids, shares = best_tokens(_logits(), 0, 13, None)
    for local_ids, local_shares in four_ranks.run(run_best_tokens):
        # Two tokens of equal logits may change places.
        assert torch.equal(local_ids.sort().values, ids.sort().values)
        torch.testing.assert_close(local_shares, shares)

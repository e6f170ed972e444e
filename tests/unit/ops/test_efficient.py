"""Attention in torch's own kernel: on the CPU its unfused twin runs, with the same bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_deberta.ops import RelativePositions, disentangled_attention
from tests.support.attention import GATHERED, LENGTH, MASKS, Inputs, random_inputs, run_attention
from tests.support.tolerances import OPERATOR

POSITIONS = RelativePositions(16, 8)


def run(inputs: Inputs, dtype: torch.dtype, backend: str, **options: Any) -> list[Tensor]:
    """Return the output and the gradients of all inputs, float64."""
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in inputs]
    out = disentangled_attention(*leaves, POSITIONS, backend=backend, **options)  # type: ignore[misc,arg-type]
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    gradients = torch.autograd.grad(out, [x for x in leaves if x is not None], d_out)
    return [x.detach().double() for x in (out, *gradients)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_mask(mask: str, dtype: torch.dtype) -> None:
    inputs = random_inputs((2, 3, LENGTH, 32), POSITIONS)
    expected = run(inputs, torch.float64, "reference", **MASKS[mask])
    for actual, exact in zip(run(inputs, dtype, "efficient", **MASKS[mask]), expected, strict=True):
        assert (actual - exact).norm() / exact.norm().clamp(0.1) < OPERATOR[dtype]


@pytest.mark.parametrize("tables", ["c2p", "p2c", "none"])
@pytest.mark.parametrize("p2c_index", ["microsoft", "paper"])
def test_every_ablation(tables: str, p2c_index: str) -> None:
    inputs = random_inputs((2, 3, LENGTH, 32), POSITIONS, tables=tables)
    results = [
        run(inputs, torch.float64, backend, p2c_index=p2c_index)
        for backend in ("reference", "efficient")
    ]
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_gradients_with_dropout_are_those_of_the_elements_that_forward_kept() -> None:
    """Backward draws the dropout again; torch's generator is left as it was."""
    inputs = [x.requires_grad_() for x in random_inputs((2, 2, 9, 8), POSITIONS) if x is not None]
    options: dict[str, Any] = {"dropout_p": 0.3, "backend": "efficient", **MASKS["causal"]}
    before = torch.get_rng_state()
    first, other_seed, other_heads = (
        disentangled_attention(*inputs, POSITIONS, seed=seed, head_offset=offset, **options)
        for seed, offset in ((1, 0), (2, 0), (1, 2))
    )
    torch.autograd.gradcheck(
        lambda *x: disentangled_attention(*x, POSITIONS, seed=1, **options), inputs, fast_mode=True
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, other_seed)
    assert not torch.equal(first, other_heads)


def test_kept_elements_are_scaled_by_the_rounded_rate() -> None:
    """Every value is 1, so an output is the kept share of the probabilities times the scale."""
    shape = (4, 8, 64, 8)
    q = k = torch.zeros(shape)
    out = disentangled_attention(
        q, k, torch.ones(shape), None, None, POSITIONS, dropout_p=0.1, seed=3, backend="efficient"
    )
    kept = out[..., 0] * 64 * (256 - 26) / 256
    torch.testing.assert_close(kept, kept.round())
    assert abs(float(out.mean()) - 1) < 0.005


def test_gathered_queries_and_the_log_sum_exp_come_from_chunked() -> None:
    inputs = random_inputs((2, 1, LENGTH, 32), POSITIONS, gathered=7)
    options: dict[str, Any] = {"q_positions": GATHERED["gathered"], "dropout_p": 0.2, "seed": 4}
    results = [
        run_attention(inputs, torch.float32, POSITIONS, backend=backend, **options)
        for backend in ("chunked", "efficient")
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

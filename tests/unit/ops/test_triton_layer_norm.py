"""The kernels of dropout + residual + LayerNorm against their twin in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.model import fused
from megatron_deberta.model.fused import drop_add_norm, drop_add_norm_backward
from megatron_deberta.ops.dropout_bits import keep_mask

pytest.importorskip("triton", reason="the fused kernels are written in Triton")
from megatron_deberta.ops.triton import layer_norm as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-7
# The interpreter truncates to bfloat16, which a GPU rounds to.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
Inputs = dict[str, Any]


def inputs(batch: int, tokens: int, features: int, dtype: torch.dtype) -> Inputs:
    """Return arguments of the forward function and the output's gradient, rounded to a dtype."""
    generator = torch.Generator().manual_seed(features)
    rows = (batch, tokens, features)
    x, residual, grad, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)
        for shape in (rows, rows, rows, (features,), (features,))
    )
    residual += 3  # a mean
    return {
        "x": x,
        "residual": residual,
        "seed": torch.tensor([(-1) ** i * (2**40 + i) for i in range(batch)], device=DEVICE),
        "positions": torch.arange(-1, tokens - 1, device=DEVICE).expand(batch, tokens),
        "weight": weight,
        "bias": bias,
        "grad": grad,
    }


def both_passes(forward: Any, backward: Any, given: Inputs, probability: float) -> list[Tensor]:
    """Return y, mean and rstd, and the gradients of x, residual, weight and bias."""
    seed, positions, weight = given["seed"], given["positions"], given["weight"]
    y, *kept = forward(
        given["x"], given["residual"], seed, positions, probability, weight, given["bias"], EPS
    )
    return [
        y, *kept[1:],
        *backward(given["grad"], *kept, seed, positions, weight, probability),
    ]  # fmt: skip


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("batch", "tokens", "features"), [(2, 3, 128), (1, 5, 768), (3, 1, 100), (2, 2, 37), (1, 1, 4)]
)
def test_outputs_and_gradients(
    batch: int, tokens: int, features: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that are no multiple of four or of a block; several rows per program."""
    if dtype == torch.bfloat16 and DEVICE == "cpu" and features < 32:
        pytest.skip("so few features do not average out what the interpreter truncates")
    monkeypatch.setattr(kernels, "MAX_PARTS", 3)
    given = inputs(batch, tokens, features, dtype)
    exact = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    found = both_passes(kernels.forward, kernels.backward, given, 0.1)
    expected = both_passes(drop_add_norm, drop_add_norm_backward, exact, 0.1)
    twin = both_passes(drop_add_norm, drop_add_norm_backward, given, 0.1)
    for index, (one, other, true) in enumerate(zip(found, twin, expected, strict=True)):
        assert one.shape == true.shape
        assert one.dtype == (torch.float32 if index in (1, 2) else dtype)
        # The sum is rounded, which few features do not average out.
        assert error(one, true) < max(TOLERANCE[dtype], 1.5 * error(other, true)), f"{index}"


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.99])
def test_dropout_bits(probability: float) -> None:
    """The same elements as in all other layouts and backends."""
    given = inputs(2, 3, 70, torch.float32)
    found = both_passes(kernels.forward, kernels.backward, given, probability)
    keep = keep_mask(given["seed"], given["positions"], 70, probability).view(2, 3, 70)
    assert torch.equal(found[3] == 0, ~keep)
    assert 0 < probability < 0.9 or keep.float().mean() != 0.5


def test_large_mean_loses_no_digits() -> None:
    given = inputs(1, 2, 64, torch.float32)
    given["residual"] += 4096
    total = given["residual"].double()
    y, _, mean, _ = kernels.forward(
        given["x"] * 0, given["residual"], given["seed"], given["positions"],
        0.1, given["weight"], given["bias"], EPS,
    )  # fmt: skip
    expected = F.layer_norm(total, (64,), given["weight"].double(), given["bias"].double(), EPS)
    assert error(mean, total.mean(-1, keepdim=True)) < 1e-6
    assert error(y, expected) < 1e-3


def test_same_bits_again_and_any_strides() -> None:
    given = inputs(2, 4, 96, torch.float16)
    first = both_passes(kernels.forward, kernels.backward, given, 0.1)
    for name in ("x", "residual", "grad"):
        given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)
    given["positions"] = given["positions"].contiguous()
    second = both_passes(kernels.forward, kernels.backward, given, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_rows() -> None:
    given = inputs(1, 2, 8, torch.float32)
    for name in ("x", "residual", "grad"):
        given[name] = given[name][:, :0]
    given["positions"] = given["positions"][:, :0]
    found = both_passes(kernels.forward, kernels.backward, given, 0.1)
    assert found[0].shape == (1, 0, 8)
    assert not found[-1].any()
    assert not found[-2].any()


def test_layer_norm_uses_them_where_they_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda x: x.dtype == torch.float32)
    monkeypatch.setattr(fused, "compiled", lambda function: pytest.fail(f"{function} compiled"))
    given = inputs(2, 3, 32, torch.float32)
    leaves = [given[name].requires_grad_() for name in ("x", "residual", "weight", "bias")]
    x, residual, weight, bias = leaves
    pending = fused.PendingResidual(x, residual, given["seed"], given["positions"], 0.1)
    y = fused.layer_norm(pending, weight, bias, EPS)
    gradients = torch.autograd.grad(y, leaves, given["grad"])
    exact = {k: v.detach().double() if v.is_floating_point() else v for k, v in given.items()}
    expected = both_passes(drop_add_norm, drop_add_norm_backward, exact, 0.1)
    for one, other in zip((y.detach(), *gradients), (expected[0], *expected[3:]), strict=True):
        assert error(one, other) < TOLERANCE[torch.float32]

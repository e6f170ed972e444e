"""The kernels of bias + GELU against their twin in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.model import fused

pytest.importorskip("triton", reason="the fused kernels are written in Triton")
from megatron_deberta.ops.triton import gelu as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates to bfloat16, which a GPU rounds to.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def inputs(rows: tuple[int, ...], features: int, dtype: torch.dtype) -> list[Tensor]:
    """Return product, bias and the output's gradient, rounded to a dtype."""
    generator = torch.Generator().manual_seed(features)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).mul(2).to(dtype).to(DEVICE)
        for shape in ((*rows, features), (features,), (*rows, features))
    ]


def both_passes(product: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients of product and bias, by the kernels."""
    return [kernels.forward(product, bias), *kernels.backward(grad, product, bias)]


def exact(product: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients of product and bias in float64, by autograd."""
    leaves = [x.double().requires_grad_() for x in (product, bias)]
    y = F.gelu(leaves[0] + leaves[1])
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.double())]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("rows", "features"), [((2, 3), 128), ((7,), 100), ((1, 1), 5), ((3, 5), 37), ((13,), 64)]
)
def test_output_and_gradients(
    rows: tuple[int, ...], features: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that are no multiple of a tile, several tiles of columns, several rows per program."""
    monkeypatch.setattr(kernels, "MAX_PARTS", 2)
    monkeypatch.setattr(kernels, "COLUMNS", 32)
    monkeypatch.setattr(kernels, "ROWS", 2)
    given = inputs(rows, features, dtype)
    found, expected = both_passes(*given), exact(*given)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape
        assert one.dtype == dtype
        assert error(one, other) < TOLERANCE[dtype], f"{index}"


def test_far_from_zero() -> None:
    """Far from zero GELU is 0 or the identity, and its derivative 0 or 1."""
    product = torch.tensor([[-30.0, -9.0, 9.0, 30.0]], device=DEVICE)
    y, d_product, d_bias = both_passes(product, torch.zeros_like(product[0]), product + 1)
    assert y[0].tolist() == pytest.approx([0.0, 0.0, 9.0, 30.0], abs=1e-12)
    assert d_product[0].tolist() == pytest.approx([0.0, 0.0, 10.0, 31.0], abs=1e-12)
    assert torch.equal(d_bias, d_product[0])


def test_same_bits_again_and_any_strides() -> None:
    given = inputs((3, 4), 48, torch.float16)
    first = both_passes(*given)
    for index in (0, 2):
        given[index] = given[index].transpose(0, 2).contiguous().transpose(0, 2)
    given[1] = given[1].repeat_interleave(2)[::2]
    assert all(torch.equal(a, b) for a, b in zip(first, both_passes(*given), strict=True))


@pytest.mark.parametrize("rows", [(0,), (2, 0)])
def test_no_rows(rows: tuple[int, ...]) -> None:
    y, d_product, d_bias = both_passes(*inputs(rows, 8, torch.float32))
    assert y.shape == d_product.shape == (*rows, 8)
    assert not d_bias.any()


def test_bias_gelu_uses_them_where_they_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda x: x.dtype == torch.float32)
    monkeypatch.setattr(fused, "compiled", lambda function: pytest.fail(f"{function} compiled"))
    product, bias, grad = inputs((2, 3), 32, torch.float32)
    leaves = [product.requires_grad_(), bias.requires_grad_()]
    y = fused.bias_gelu(*leaves)
    found = [y.detach(), *torch.autograd.grad(y, leaves, grad)]
    for one, other in zip(found, exact(product.detach(), bias.detach(), grad), strict=True):
        assert error(one, other) < TOLERANCE[torch.float32]

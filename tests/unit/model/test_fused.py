"""Fused functions against their unfused equivalents: outputs and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.data.batch import Batch
from megatron_deberta.model import DropoutSeeds, RuntimeOptions
from megatron_deberta.model.dropout import Dropout, DropoutExecution
from megatron_deberta.model.fused import (
    PendingResidual,
    _bias_gelu,
    _bias_gelu_backward,
    bias_gelu,
    drop_add_norm,
    drop_add_norm_backward,
    layer_norm,
)
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import MaskedLanguageModel
from tests.support.compiler import needs_compiler
from tests.support.stock_weights import randomize
from tests.support.tiny_models import V2
from tests.support.tolerances import FP64

SEEDS = DropoutSeeds(3, 5, torch.tensor([7, 2**40]))
EPS = 1e-7
CONFIG = replace(V2, conv_kernel_size=3)


def draw(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def normed(dtype: torch.dtype, *, fuse: bool, of: torch.dtype | None = None) -> list[Tensor]:
    """Output and gradients of LayerNorm(residual + dropout(x)); values rounded to ``of`` first."""
    rows = (2, 16, 32)
    drawn = draw(of or dtype, rows, rows, (32,), (32,), rows)
    x, residual, weight, bias, upstream = (t.detach().to(dtype).requires_grad_() for t in drawn)
    dropout = Dropout(0.1, "site")
    dropout.execution = DropoutExecution(fuse=fuse)
    value = dropout.before_norm(x, torch.arange(16).expand(2, 16), SEEDS, residual)
    assert isinstance(value, PendingResidual) == fuse
    out = layer_norm(value, weight, bias, EPS)
    out.backward(upstream.detach())
    return [out.detach(), *(t.grad for t in (x, residual, weight, bias) if t.grad is not None)]


def activated(dtype: torch.dtype, *, fuse: bool, of: torch.dtype | None = None) -> list[Tensor]:
    """Output and gradients of GELU(product + bias)."""
    drawn = draw(of or dtype, (2, 16, 64), (64,), (2, 16, 64))
    product, bias, upstream = (t.detach().to(dtype).requires_grad_() for t in drawn)
    out = bias_gelu(product, bias) if fuse else F.gelu(product + bias)
    out.backward(upstream.detach())
    return [out.detach(), *(t.grad for t in (product, bias) if t.grad is not None)]


@pytest.mark.nightly  # Compiling takes up to half a minute.
@needs_compiler
@pytest.mark.parametrize("work", [normed, activated])
def test_fused_equals_unfused_in_float64(work: Any) -> None:
    found, expected = work(torch.float64, fuse=True), work(torch.float64, fuse=False)
    assert len(found) == (5 if work is normed else 3)
    torch.testing.assert_close(found, expected, **FP64)


@pytest.mark.nightly  # Compiling takes up to half a minute.
@needs_compiler
@pytest.mark.parametrize("work", [activated])
def test_bfloat16_error_is_no_larger_than_unfused(work: Any) -> None:
    """Allow one more rounding of the output; the unfused code rounds after each operation."""
    dtype = torch.bfloat16
    exact = work(torch.float64, fuse=False, of=dtype)
    found, unfused = work(dtype, fuse=True), work(dtype, fuse=False)
    for one, other, true in zip(found, unfused, exact, strict=True):
        assert one.dtype == dtype
        error, allowed = ((t.double() - true).norm() / true.norm() for t in (one, other))
        assert error <= max(1.1 * allowed, torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_uncompiled_functions(dtype: torch.dtype) -> None:
    """The functions without compilation, against autograd of the unfused equivalents."""
    x, residual, weight, bias, upstream = (
        t.detach() for t in draw(dtype, *[(2, 16, 32)] * 2, (32,), (32,), (2, 16, 32))
    )
    seed, positions = SEEDS.per_row(Dropout(0.1, "site").site), torch.arange(16).expand(2, 16)
    y, *kept = drop_add_norm(x, residual, seed, positions, 0.1, weight, bias, EPS)
    found = [y, *drop_add_norm_backward(upstream, *kept, seed, positions, weight, 0.1)]
    product, bias, upstream = (t.detach() for t in draw(dtype, (2, 16, 64), (64,), (2, 16, 64)))
    found += [_bias_gelu(product, bias), *_bias_gelu_backward(upstream, product, bias)]
    expected = normed(dtype, fuse=False) + activated(dtype, fuse=False)
    if dtype == torch.float64:
        torch.testing.assert_close(found, expected, **FP64)
    else:
        for one, other in zip(found, expected, strict=True):
            assert (one.double() - other.double()).norm() < 0.01 * other.double().norm()


def gradients(recompute: Any, *, fuse: bool) -> dict[str, Tensor]:
    """Loss and gradients of a model; every position is selected, so that there is one shape."""
    model = MaskedLanguageModel(CONFIG, RuntimeOptions(recompute=recompute, fuse=fuse)).double()
    randomize(model)
    ids = torch.randint(4, 67, (2, 16), generator=torch.Generator().manual_seed(2))
    selected = torch.arange(16).expand(2, 16)
    batch = Batch(ModelInputs(ids), selected, ids, SEEDS.samples)
    loss = model.train()(batch, SEEDS).losses["masked"].loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_model_loss_and_gradients(recompute: str) -> None:
    """Not compiled, because that takes seconds per shape."""
    with torch.compiler.set_stance("force_eager"):
        expected = gradients("none", fuse=False)
        found = gradients(recompute, fuse=True)
    torch.testing.assert_close(found, expected, **FP64)

"""Fused projections against separate ones: outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_deberta.model.projections import project_together
from tests.support.tolerances import FP64


def layers(widths: tuple[int, ...], biases: tuple[bool, ...]) -> list[nn.Linear]:
    torch.manual_seed(3)
    pairs = zip(widths, biases, strict=True)
    return [nn.Linear(6, width, bias=bias).double() for width, bias in pairs]


@pytest.mark.parametrize("shape", [(2, 5, 6), (7, 6)], ids=["rows", "table"])
@pytest.mark.parametrize("biases", [(True, True, True), (True, False, True), (False,) * 3])
def test_equal_to_separate_projections(shape: tuple[int, ...], biases: tuple[bool, ...]) -> None:
    found = []
    for together in (True, False):
        parts = layers((4, 4, 8), biases)
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        outs = project_together(x, parts) if together else [part(x) for part in parts]
        sum((out.sin() * (i + 1)).sum() for i, out in enumerate(outs)).backward()  # type: ignore[union-attr]
        gradients = [p.grad for part in parts for p in part.parameters()]
        found.append([*outs, x.grad, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **FP64)


def test_gradcheck() -> None:
    parts = layers((3, 2), (True, False))
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def project(*inputs: Any) -> Any:
        weights = dict(zip(("weight", "bias"), inputs[1:3], strict=True))
        calls = [(parts[0], weights), (parts[1], {"weight": inputs[3]})]
        for part, values in calls:
            for name, value in values.items():
                delattr(part, name)
                setattr(part, name, value)
        return project_together(inputs[0], parts)

    leaves = [parts[0].weight, parts[0].bias, parts[1].weight]
    assert torch.autograd.gradcheck(project, (x, *leaves))


def test_concatenated_weights_are_not_saved_for_backward() -> None:
    parts, saved = layers((6, 6, 6), (True, True, True)), []
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        project_together(x, parts)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (x, *(p.weight for p in parts))}

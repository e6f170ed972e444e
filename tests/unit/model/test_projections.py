"""Fused projections against separate ones: outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_deberta.model.parallel_layers import InputExchange, project_together
from megatron_deberta.ops import RelativePositions, disentangled_attention
from tests.support.compiler import needs_compiler
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
    torch.testing.assert_close(*found, **FP64)


class Concatenations(TorchDispatchMode):
    """Counts concatenations of activations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.cat.default and args[0][0].dim() == 3
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("adjacent", [True, False])
def test_gradients_of_one_buffer_are_not_concatenated(adjacent: bool) -> None:
    """In the order of the layers; else they are."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=generator).requires_grad_()
    found = []
    for together in (True, False):
        parts = layers((4, 4, 4), (True, True, True))
        buffer = torch.arange(120.0, dtype=torch.float64).view(2, 5, 12).sin()
        grads = list(buffer.split(4, dim=-1))
        if not adjacent:
            grads = [grads[1], grads[0], grads[2]]
        outs = project_together(x, parts) if together else [part(x) for part in parts]
        leaves = [x, *(p for part in parts for p in part.parameters())]
        with Concatenations() as mode:
            found.append(torch.autograd.grad(outs, leaves, grads))
        assert mode.count == (together and not adjacent)
    torch.testing.assert_close(*found, **FP64)


def sequence_first() -> InputExchange:
    """Return the exchange of sequence parallelism for one rank."""
    return InputExchange(
        lambda x: x.transpose(0, 1).contiguous(),
        lambda grad: lambda: grad.transpose(0, 1),
        sequence_first=True,
    )


def test_equal_in_the_order_of_sequence_parallelism() -> None:
    found = []
    for exchange in (None, sequence_first()):
        parts = layers((4, 8), (True, False))
        x = torch.linspace(-1, 1, 60, dtype=torch.float64).view(2, 5, 6).requires_grad_()
        one, two = project_together(x, parts, exchange=exchange)
        assert one.shape == (2, 5, 4)
        gradients = torch.autograd.grad((one.sin().sum() + two.cos()).sum(), [x, parts[0].weight])
        found.append([one, two, *gradients])
    torch.testing.assert_close(*found, **FP64)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(
    ("kernels", "exchange"),
    [
        ("triton", None),
        ("triton", sequence_first()),
        pytest.param("native", None, marks=needs_compiler),
    ],
    ids=["triton", "triton, sequence parallel", "native"],
)
def test_attention_in_kernels_concatenates_nothing(
    kernels: str, exchange: InputExchange | None, heads: int
) -> None:
    """From the attention's output to the weights; kernels of GPUs run in the interpreter."""
    if kernels == "triton":
        pytest.importorskip("triton", reason="the fused kernels are written in Triton")
    parts, positions = [nn.Linear(32, 32 * heads) for _ in range(3)], RelativePositions(5, 0)
    x = torch.randn(2, 18, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for backend in (kernels, "reference"):
        q, k, v = (
            out.unflatten(-1, (heads, 32)).transpose(1, 2)
            for out in project_together(x, parts, exchange=exchange)
        )
        out = disentangled_attention(q, k, v, None, None, positions, backend=backend)
        if backend == "triton":
            assert out.stride()[:1] + out.stride()[2:3] == (
                (32 * heads, 2 * 32 * heads) if exchange else (18 * 32 * heads, 32 * heads)
            )
        leaves = [p for part in parts for p in part.parameters()]
        with Concatenations() as mode:
            found.append(torch.autograd.grad(out.square().sum(), leaves))
        assert mode.count == (backend == "reference")
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


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

"""All heads at once, as `chunked` computes on GPUs: fp16 operands, few operators, no scatter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_deberta.hf import packed_attention as packed_attention_module
from megatron_deberta.hf.packed_attention import PackedRows, packed_attention
from megatron_deberta.ops import RelativePositions, batched, chunked
from tests.support.attention import (
    GATHERED,
    LENGTH,
    MASKS,
    random_inputs,
    relative_error,
    run_attention,
)
from tests.support.tolerances import OPERATOR

POSITIONS = RelativePositions(16, 8)


class Operators(TorchDispatchMode):
    """Records the names of dispatched operators other than views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunked, packed_attention_module):
        monkeypatch.setattr(module, "is_batched", lambda device: True)


def run(
    dtype: torch.dtype, backend: str, *, heads: int = 3, gathered: bool = False
) -> list[Tensor]:
    """Return the output, the log-sum-exp and the gradients of all inputs, float64."""
    queries = GATHERED["gathered" if gathered else "consecutive"]
    return run_attention(
        random_inputs((2, heads, LENGTH, 32), POSITIONS, gathered=queries), dtype, POSITIONS,
        q_positions=queries, dropout_p=0.1, seed=5, backend=backend, **MASKS["padding"],
    )  # fmt: skip


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_operands_of_16_bits_are_as_exact_as_the_other_backends(
    dtype: torch.dtype, gathered: bool
) -> None:
    exact = run(torch.float64, "reference", gathered=gathered)
    for actual, expected in zip(run(dtype, "chunked", gathered=gathered), exact, strict=True):
        assert relative_error(actual, expected) < OPERATOR[dtype]


def test_products_multiply_16_bits_and_sum_scores_and_gradients_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[tuple[torch.dtype, ...]] = set()
    compute = batched.product_

    def watched(out: Tensor, a: Tensor, b: Tensor, **factors: float) -> Tensor:
        seen.add((a.dtype, b.dtype, out.dtype))
        return compute(out, a, b, **factors)

    monkeypatch.setattr(batched, "product_", watched)
    run(torch.float16, "chunked")
    half, wide = torch.float16, torch.float32
    assert seen == {(half, half, half), (half, half, wide)}


@pytest.mark.parametrize("gathered", [False, True])
def test_operators_do_not_depend_on_the_number_of_heads_and_none_scatters(gathered: bool) -> None:
    names = []
    for heads in (2, 8):
        with Operators() as operators:
            run(torch.float32, "chunked", heads=heads, gathered=gathered)
        names.append(operators.names)
    assert names[0] == names[1]
    assert not [name for name in names[0] if "scatter" in name or "index_add" in name]


def test_packed_rows() -> None:
    lengths, generator = (1, 9, 0, 9, 3), torch.Generator().manual_seed(1)
    shapes = [(sum(lengths), 3, 4)] * 3 + [(3, 2 * POSITIONS.span, 4)] * 2
    x = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    rows = PackedRows(lengths, torch.device("cpu"))
    results = []
    for backend in ("reference", "chunked"):
        leaves = [one.clone().requires_grad_() for one in x]
        out = packed_attention(
            *leaves, POSITIONS, rows, dropout_p=0.0, seed=None, scale=0.3, backend=backend
        )
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)

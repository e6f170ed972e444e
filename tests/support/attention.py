"""Runs of the attention operator with gradients, and their relative errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_deberta.ops import RelativePositions, disentangled_attention
from tests.support.tolerances import OPERATOR

Inputs = list[Tensor | None]
"""q, k, v, pos_key, pos_query"""
LENGTH = 37
"""Tokens of the rows of ``MASKS`` and ``GATHERED``."""
_AT = torch.arange(LENGTH)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"attention_mask": _AT < torch.tensor([[LENGTH], [20]])},
    "padding before": {"attention_mask": _AT >= torch.tensor([[18], [0]])},
    "nothing real": {"attention_mask": _AT < torch.tensor([[LENGTH], [0]])},
    "documents": {"document_ids": torch.stack([_AT // 15, _AT // 5])},
    "causal": {"causal": True},
    "everything": {
        "causal": True,
        "document_ids": (_AT // 9).expand(2, -1),
        "attention_mask": _AT < torch.tensor([[LENGTH - 5], [1]]),
    },
}
"""Every kind of mask, of two rows."""
GATHERED = {
    "consecutive": None,
    "gathered": torch.tensor([[0, 36, 7, 7, 20, 20, 35], [5, -1, 3, 36, -1, -1, 18]]),
}
"""Positions of queries: in any order, repeated and padding."""


def random_inputs(
    shape: tuple[int, int, int, int],
    positions: RelativePositions,
    *,
    tables: str = "both",
    gathered: Tensor | int | None = None,
) -> Inputs:
    """Return float64 inputs that are exact in float16.

    Args:
        shape: batch, heads, length, size.
        positions: map from distances to slots.
        tables: the position terms.
        gathered: positions of the queries, or their number; None: a query at each position.
    """
    generator = torch.Generator().manual_seed(0)
    batch, heads, length, size = shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).half().double()

    queries = gathered.shape[1] if isinstance(gathered, Tensor) else gathered
    queries = length if queries is None else queries
    q, k, v = (normal(batch, heads, count, size) for count in (queries, length, length))
    pos_key, pos_query = (normal(heads, 2 * positions.span, size) for _ in range(2))
    return [
        q,
        k,
        v,
        pos_key if tables in ("both", "c2p") else None,
        pos_query if tables in ("both", "p2c") else None,
    ]


def fixed_projection(output: Tensor) -> Tensor:
    """Return the gradient of the output in ``run_attention``, like the output."""
    generator = torch.Generator().manual_seed(9)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)


def run_attention(
    inputs: Inputs,
    dtype: torch.dtype,
    positions: RelativePositions,
    *,
    device: str = "cpu",
    **options: Any,
) -> list[Tensor]:
    """Return output, log-sum-exp and gradients of a fixed projection of the output, in float64."""
    leaves = [None if x is None else x.to(device, dtype).requires_grad_() for x in inputs]
    q, k, v, pos_key, pos_query = leaves
    assert q is not None
    assert k is not None
    assert v is not None
    output, lse = disentangled_attention(
        q, k, v, pos_key, pos_query, positions, return_lse=True, **options
    )
    assert output.dtype == dtype
    assert lse.dtype == torch.float32
    assert not lse.requires_grad
    differentiable = [x for x in leaves if x is not None]
    gradients = torch.autograd.grad(output, differentiable, fixed_projection(output))
    return [x.detach().cpu().double() for x in (output, lse, *gradients)]


def relative_error(actual: Tensor, expected: Tensor, least: float = 0.1) -> float:
    """Return the relative Frobenius norm of the difference; infinities must agree.

    Gradients that vanish, as those of scores do in a row of one token, count as small ones, of
    norm ``least``.
    """
    assert torch.equal(torch.isinf(actual), torch.isinf(expected))
    actual, expected = (x.nan_to_num(posinf=0.0, neginf=0.0) for x in (actual, expected))
    return float((actual - expected).norm() / expected.norm().clamp(min=least))


def assert_matches_reference(
    shape: tuple[int, int, int, int],
    positions: RelativePositions,
    *dtypes: torch.dtype,
    backend: str,
    tables: str = "both",
    device: str = "cpu",
    least: float = 0.1,
    **options: Any,
) -> None:
    """Compare a backend with the float64 reference: outputs, log-sum-exp and gradients.

    Args:
        shape: batch, heads, length, size.
        positions: map from distances to slots.
        *dtypes: of the inputs.
        backend: name of the backend.
        tables: the position terms.
        device: where it runs.
        least: as in ``relative_error``.
        **options: of the operator.
    """
    inputs = random_inputs(shape, positions, tables=tables, gathered=options.get("q_positions"))
    expected = run_attention(inputs, torch.float64, positions, backend="reference", **options)
    for dtype in dtypes:
        actual = run_attention(inputs, dtype, positions, device=device, backend=backend, **options)
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            # The log-sum-exp is float32 even of float64 inputs.
            limit = OPERATOR[torch.float32 if (index, dtype) == (1, torch.float64) else dtype]
            assert relative_error(a, e, least) < limit, f"{dtype}, result {index}"


def assert_later_tokens_do_not_matter(
    inputs: Inputs,
    positions: RelativePositions,
    q_positions: Tensor | None,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    **options: Any,
) -> None:
    """Check causal attention: no output changes with later keys, nor has a gradient to them."""
    cut = 20
    q, k, v, pos_key, pos_query = (
        None if x is None else x.to(device, dtype, copy=True).requires_grad_() for x in inputs
    )
    assert q is not None
    assert k is not None
    assert v is not None
    at = torch.arange(k.shape[2]).expand(k.shape[0], -1) if q_positions is None else q_positions
    early = ((at >= 0) & (at <= cut)).to(device)[:, None, :, None]
    if q_positions is not None:
        options["q_positions"] = q_positions.to(device)

    def attend() -> Tensor:
        output = disentangled_attention(
            q, k, v, pos_key, pos_query, positions, causal=True, **options
        )
        return torch.where(early, output, 0)

    before = attend()
    assert before.abs().sum() > 0
    for gradient in torch.autograd.grad(before.float().square().sum(), (k, v)):
        assert gradient[:, :, : cut + 1].any()
        assert not gradient[:, :, cut + 1 :].any()
    with torch.no_grad():
        for x in (k, v) if q_positions is not None else (q, k, v):
            x[:, :, cut + 1 :] = 7
        assert torch.equal(attend(), before)

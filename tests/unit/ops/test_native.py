"""The compiled CPU kernels against the float64 reference: outputs, log-sum-exp and gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_deberta.hf.packed_attention import PackedRows, packed_attention
from megatron_deberta.ops import RelativePositions, disentangled_attention
from megatron_deberta.ops.dispatch import choose_backend
from megatron_deberta.ops.dropout_bits import keep_mask, keep_scale
from megatron_deberta.ops.native import backend
from tests.support.attention import (
    GATHERED,
    LENGTH,
    MASKS,
    assert_matches_reference,
    fixed_projection,
    random_inputs,
    run_attention,
)
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler
LINEAR, BUCKETS = RelativePositions(16, 0), RelativePositions(16, 8)


DEFAULT = RelativePositions()
assert_matches = partial(assert_matches_reference, backend="native")


@pytest.mark.parametrize("positions", [LINEAR, BUCKETS], ids=["linear", "buckets"])
@pytest.mark.parametrize("p2c_index", ["microsoft", "paper"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", GATHERED)
def test_every_mask(positions: RelativePositions, p2c_index: str, mask: str, queries: str) -> None:
    assert_matches(
        (2, 3, LENGTH, 32), positions, torch.float32, dropout_p=0.2, seed=3, head_offset=4,
        p2c_index=p2c_index, q_positions=GATHERED[queries], **MASKS[mask],
    )  # fmt: skip


@pytest.mark.parametrize("tables", ["both", "c2p", "p2c", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("queries", GATHERED)
def test_every_ablation_and_dtype(tables: str, dtype: torch.dtype, queries: str) -> None:
    assert_matches(
        (2, 2, LENGTH, 16), BUCKETS, dtype, tables=tables, q_positions=GATHERED[queries],
        dropout_p=0.1, seed=1,
    )  # fmt: skip


# Blocks have 6 rows or a multiple; rows of more than 256 tokens have several.
@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 16, 17, 64, 129, 300, 611])
@pytest.mark.parametrize("size", [16, 48, 64, 128])
def test_odd_lengths_and_heads(length: int, size: int) -> None:
    seed = torch.tensor([-5, 1 << 50])
    assert_matches((2, 1, length, size), DEFAULT, torch.float32, dropout_p=0.1, seed=seed)


@pytest.mark.parametrize("length", [1, 17, 300, 1281])
def test_gathered_queries_of_odd_lengths(length: int) -> None:
    at = torch.arange(length).repeat(2, 1)[:, ::5]
    options = {"q_positions": at, "dropout_p": 0.1, "seed": 4}
    assert_matches((2, 1, length, 64), DEFAULT, torch.float32, **options)


def test_long_rows_of_documents() -> None:
    lengths = [700, 1, 330, 250]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    assert_matches((1, 1, 1281, 32), DEFAULT, torch.float32, document_ids=documents)


def test_threads_do_not_change_a_bit() -> None:
    inputs = random_inputs((2, 6, 129, 32), BUCKETS)
    options: dict[str, Any] = {"backend": "native", "dropout_p": 0.1, "seed": 2}
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(run_attention(inputs, torch.float32, BUCKETS, **options))
    finally:
        torch.set_num_threads(1)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("broken", ["q", "k", "v"])
def test_numbers_that_are_not_finite_reach_the_output(broken: str) -> None:
    q, k, v = (torch.randn(1, 1, 20, 16) for _ in range(3))
    {"q": q, "k": k, "v": v}[broken][0, 0, 3] = float("nan")
    out = disentangled_attention(q, k, v, None, None, BUCKETS, backend="native")
    assert torch.isnan(out[0, 0, 3 if broken == "q" else 0]).any()


LENGTHS = [(5,), (4, 4, 4), (1, 9, 0, 9, 3), (150, 2, 140), (0, 7)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_packed_rows(lengths: tuple[int, ...], dropout_p: float) -> None:
    rows, tokens = PackedRows(lengths, torch.device("cpu")), sum(lengths) + 2
    seed = torch.arange(len(lengths)) + 11
    made = [torch.randn(tokens, 3, 16) for _ in range(3)]
    made += [torch.randn(3, 2 * BUCKETS.span, 16) for _ in range(2)]
    d_out = torch.randn(tokens, 3, 16)
    results = []
    for name in ("native", "chunked"):
        x = [one.clone().requires_grad_() for one in made]
        out = packed_attention(
            *x, BUCKETS, rows, dropout_p=dropout_p, seed=seed, scale=0.2, backend=name
        )
        results.append([out, *torch.autograd.grad(out, x, d_out)])
    assert not results[0][0][sum(lengths) :].any()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("queries", GATHERED)
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_torchs_default_dtype_and_device_do_not_matter(default: torch.dtype, queries: str) -> None:
    """The kernels write float32 to memory of the CPU, whatever new tensors are by default."""
    at, options = GATHERED[queries], {**MASKS["everything"], "dropout_p": 0.1, "seed": 2}
    inputs = random_inputs((2, 3, LENGTH, 16), BUCKETS, gathered=at)
    expected = run_attention(
        inputs, torch.float32, BUCKETS, backend="native", q_positions=at, **options
    )
    leaves = [None if x is None else x.float().requires_grad_() for x in inputs]
    d_output = fixed_projection(expected[0]).float()
    # With an int, the operator makes the seeds on the device of the queries.
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):
            output = disentangled_attention(
                *leaves, BUCKETS, backend="native", q_positions=at, **options
            )
            grads = torch.autograd.grad(output, [x for x in leaves if x is not None], d_output)
    finally:
        torch.set_default_dtype(torch.float32)
    for actual, wanted in zip([output, *grads], [expected[0], *expected[2:]], strict=True):
        assert torch.equal(actual.double(), wanted)


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        @staticmethod
        def call_size() -> int:
            return 8

    q = torch.randn(1, 1, 3, 16)
    monkeypatch.setattr(backend, "library", lambda: Other)
    with pytest.raises(RuntimeError, match="was replaced after this process had started"):
        disentangled_attention(q, q, q, None, None, BUCKETS, backend="native")


def test_what_the_kernels_do_not_support_takes_the_slower_ones() -> None:
    for q in (torch.zeros(1, 1, 1, 24), torch.zeros(1, 1, 1, 32, dtype=torch.float64)):
        assert choose_backend(None, q) == "chunked"
        with pytest.raises(ValueError, match="backend: got 'native', but .*expected 'chunked'"):
            choose_backend("native", q)
    assert choose_backend(None, torch.zeros(1, 1, 1, 32, device="meta")) == "chunked"


@pytest.mark.parametrize("shape", [(2, 5, 19), (8, 12)], ids=["rows", "table"])
def test_dropout_equals_the_definition(shape: tuple[int, ...]) -> None:
    x, residual = torch.randn(shape), torch.randn(shape)
    seed = torch.tensor([7, 2**40])[: 1 if len(shape) == 2 else 2]
    positions = torch.arange(shape[-2]).expand(shape[:-1])
    keep = keep_mask(seed, positions, shape[-1], 0.1).view(shape)
    expected: Tensor = x * keep * keep_scale(0.1)
    assert backend.can_drop(x)
    assert torch.equal(backend.drop(x, None, seed, positions, 0.1), expected)
    actual = backend.drop(x, residual, seed, positions, 0.1)
    torch.testing.assert_close(actual, residual + expected, rtol=1e-6, atol=1e-6)
    assert not backend.can_drop(x.bfloat16())

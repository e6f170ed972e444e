"""The chunked backend against the float64 reference: every feature, outputs and gradients."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_deberta.ops import (
    RelativePositions,
    batched,
    chunked,
    disentangled_attention,
    position_terms,
)
from tests.support import attention
from tests.support.attention import (
    GATHERED,
    LENGTH,
    MASKS,
    Inputs,
    assert_later_tokens_do_not_matter,
    assert_matches_reference,
    fixed_projection,
    random_inputs,
    run_attention,
)
from tests.support.compiler import needs_compiler
from tests.support.memory import LargestTensor
from tests.support.tolerances import OPERATOR

LINEAR, BUCKETS = RelativePositions(16, 0), RelativePositions(16, 8)
BATCH, HEADS, SIZE = 2, 3, 8
run = run_attention
relative_error = partial(attention.relative_error, least=1e-6)


def tensors(length: int, positions: RelativePositions, **options: Any) -> Inputs:
    """Return float64 q, k, v, pos_key and pos_query."""
    return random_inputs((BATCH, HEADS, length, SIZE), positions, **options)


def assert_chunked_matches(length: int, positions: RelativePositions, **options: Any) -> None:
    assert_matches_reference(
        (BATCH, HEADS, length, SIZE), positions, torch.float32, torch.float64,
        backend="chunked", least=1e-6, **options,
    )  # fmt: skip


@pytest.fixture(params=["whole", "small blocks", "all heads", "all heads, small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the default block size and with several blocks and strips per row.

    One head at a time, as on the CPU, and with all heads at once, as on GPUs.
    """
    if "all heads" in request.param:
        monkeypatch.setattr(chunked, "is_batched", lambda device: True)
    if "small blocks" in request.param:
        monkeypatch.setattr(batched, "BLOCK_ELEMENTS", 15 * 37)
        monkeypatch.setattr(batched, "STRIP", 5)
        monkeypatch.setattr(chunked, "_BLOCK_ELEMENTS", 7 * 37)
        monkeypatch.setattr(position_terms, "STRIP", 5)
        monkeypatch.setattr(position_terms, "_KEY_STRIP", 11)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    ("positions", "p2c_index"),
    [
        pytest.param(LINEAR, "microsoft", id="linear-microsoft", marks=pytest.mark.nightly),
        pytest.param(BUCKETS, "microsoft", id="buckets-microsoft"),
        pytest.param(LINEAR, "paper", id="linear-paper"),
        pytest.param(BUCKETS, "paper", id="buckets-paper", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", GATHERED)
def test_every_mask(positions: RelativePositions, p2c_index: str, mask: str, queries: str) -> None:
    options = {**MASKS[mask], "q_positions": GATHERED[queries], "p2c_index": p2c_index}
    assert_chunked_matches(LENGTH, positions, dropout_p=0.2, seed=3, head_offset=4, **options)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("tables", ["both", "c2p", "p2c", "none"])
@pytest.mark.parametrize("queries", GATHERED)
def test_every_ablation(tables: str, queries: str) -> None:
    assert_chunked_matches(LENGTH, BUCKETS, tables=tables, q_positions=GATHERED[queries])


@pytest.mark.parametrize("length", [1, 2, 15, 129, 261])
@pytest.mark.parametrize("gathered", [False, True])
def test_odd_lengths(length: int, gathered: bool) -> None:
    q_positions = torch.arange(length).repeat(2, 1)[:, ::5] if gathered else None
    seed = torch.tensor([-5, 1 << 50])
    assert_chunked_matches(length, BUCKETS, q_positions=q_positions, dropout_p=0.1, seed=seed)


NATIVE = pytest.param("native", marks=needs_compiler)


@pytest.mark.parametrize("backend", ["chunked", NATIVE])
def test_zero_gathered_queries(backend: str) -> None:
    inputs = random_inputs((BATCH, HEADS, 9, 16), BUCKETS, gathered=0)
    at = torch.zeros(2, 0, dtype=torch.int64)
    output, lse, *gradients = run(inputs, torch.float32, BUCKETS, q_positions=at, backend=backend)
    assert output.shape == (BATCH, HEADS, 0, 16)
    assert lse.shape == (BATCH, HEADS, 0)
    assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("backend", ["reference", "chunked", NATIVE])
@pytest.mark.parametrize("queries", GATHERED)
def test_causal_outputs_do_not_depend_on_later_tokens(backend: str, queries: str) -> None:
    q_positions = GATHERED[queries]
    inputs = random_inputs((BATCH, HEADS, LENGTH, 16), BUCKETS, gathered=q_positions)
    dtype = torch.float32 if backend == "native" else torch.float64
    assert_later_tokens_do_not_matter(inputs, BUCKETS, q_positions, dtype, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_queries_that_see_nothing_give_zeros_and_no_gradient(backend: str) -> None:
    at = torch.tensor([[-1, 4], [2, 3]])
    padding = torch.tensor([[True], [False]]).expand(2, 9)
    output, lse, d_q, *gradients = run(
        tensors(9, BUCKETS, gathered=2),
        torch.float32,
        BUCKETS,
        q_positions=at,
        attention_mask=padding,
        dropout_p=0.1,
        seed=1,
        backend=backend,
    )
    for dead in (output[0, :, 0], output[1], d_q[0, :, 0], d_q[1]):
        assert not dead.any()
    assert output[0, :, 1].all()
    assert torch.isinf(lse[1]).all()
    assert torch.isfinite(lse[0, :, 1]).all()
    assert all(torch.isfinite(x).all() for x in gradients)
    assert not gradients[0][1].any()  # keys of the row that nothing sees


def test_an_int_seed_is_that_seed_plus_the_rows_index() -> None:
    inputs = tensors(12, BUCKETS)
    by_int = run(inputs, torch.float32, BUCKETS, dropout_p=0.5, seed=7)
    by_row = run(inputs, torch.float32, BUCKETS, dropout_p=0.5, seed=torch.tensor([7, 8]))
    assert torch.equal(by_int[0], by_row[0])


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("queries", GATHERED)
def test_gradcheck(queries: str) -> None:
    q_positions = GATHERED[queries]
    length = 5
    gathered = None
    if q_positions is not None:
        q_positions, gathered = q_positions[:, :3].clamp(max=length - 1), 3
    small = RelativePositions(3, 0)
    # One head: a difference quotient per element.
    inputs = [
        None if x is None else x[..., :1, :, :3].clone().requires_grad_()
        for x in tensors(length, small, gathered=gathered)
    ]

    def attend(*x: Tensor) -> Tensor:
        return disentangled_attention(
            *x,
            positions=small,
            q_positions=q_positions,
            attention_mask=torch.arange(length) < torch.tensor([[5], [3]]),
            dropout_p=0.2,
            seed=4,
            backend="chunked",
        )

    assert torch.autograd.gradcheck(attend, inputs)


def eager_half(inputs: list[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """Compute attention as transformers does: products and softmax in the input's dtype."""
    q, k, v, pos_key, pos_query = (x.to(dtype).requires_grad_() for x in inputs if x is not None)
    length = q.shape[2]
    slots = BUCKETS.slots(torch.arange(length)[:, None] - torch.arange(length))
    slots = slots.expand(BATCH, HEADS, -1, -1)
    scale = (3 * SIZE) ** 0.5
    scores = q @ (k.transpose(-1, -2) / scale)
    scores = scores + (q @ pos_key.transpose(-1, -2)).gather(-1, slots) / scale
    from_keys = (k @ pos_query.transpose(-1, -2)).gather(-1, slots.transpose(-1, -2))
    scores = scores + from_keys.transpose(-1, -2) / scale
    output = scores.softmax(-1) @ v
    leaves = (q, k, v, pos_key, pos_query)
    gradients = torch.autograd.grad(output, leaves, fixed_projection(output))
    return [x.detach().double() for x in (output, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_near_float64_and_never_worse_than_eager(dtype: torch.dtype) -> None:
    # Rounded first: both sides get the same inputs, the error is the computation's.
    inputs = [None if x is None else x.to(dtype).double() for x in tensors(150, BUCKETS)]
    expected = run(inputs, torch.float64, BUCKETS, backend="reference")
    del expected[1]
    actual = run(inputs, dtype, BUCKETS, backend="chunked")
    del actual[1]
    for a, e, eager in zip(actual, expected, eager_half(inputs, dtype), strict=True):
        assert relative_error(a, e) < OPERATOR[dtype]
        assert relative_error(a, e) <= relative_error(eager, e)


@pytest.mark.parametrize(
    ("backend", "mask"), [("reference", "none"), *(("chunked", mask) for mask in MASKS)]
)
def test_float16_survives_scores_of_60000(backend: str, mask: str) -> None:
    q, k, v, *tables = tensors(LENGTH, BUCKETS)
    assert q is not None
    assert k is not None
    q, k = q.sign() * 87, k.sign() * 87  # 8 products of 87 * 87 are 60,552
    k[:, :, ::2] *= -1
    inputs = [q, k, v, *tables]
    options: dict[str, Any] = {**MASKS[mask], "scale": 1.0, "dropout_p": 0.2, "seed": 3}
    expected = run(inputs, torch.float64, BUCKETS, backend="reference", **options)
    actual = run(inputs, torch.float16, BUCKETS, backend=backend, **options)
    for a, e in zip(actual[:2], expected[:2], strict=True):
        assert relative_error(a, e) < OPERATOR[torch.float16]
    assert all(torch.isfinite(x).all() for x in (actual[0], *actual[2:]))


def test_results_repeat_bit_for_bit_and_under_recomputation() -> None:
    inputs = tensors(50, BUCKETS, gathered=6)
    at = torch.tensor([[0, 3, 3, 3, 49, 8], [5, 6, -1, -1, 2, 1]])
    for q_positions, rows in ((None, tensors(50, BUCKETS)), (at, inputs)):
        options: dict[str, Any] = {"q_positions": q_positions, "dropout_p": 0.1, "seed": 1}
        first = run(rows, torch.float32, BUCKETS, **options)
        again = run(rows, torch.float32, BUCKETS, **options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        leaves = [x.float().requires_grad_() for x in rows if x is not None]

        def attend(*x: Tensor, options: dict[str, Any] = options) -> Tensor:
            return disentangled_attention(*x, positions=BUCKETS, **options)

        output = checkpoint(attend, *leaves, use_reentrant=False)
        gradients = torch.autograd.grad(output, leaves, fixed_projection(output))
        assert torch.equal(output.detach().double(), first[0])
        assert all(torch.equal(a.double(), b) for a, b in zip(gradients, first[2:], strict=True))


def test_any_strides() -> None:
    inputs = tensors(21, BUCKETS)
    expected = run(inputs, torch.float32, BUCKETS)
    leaves = []
    for x in inputs:
        assert x is not None
        wide = torch.zeros(*x.shape[:-1], 2 * SIZE, dtype=torch.float32)
        strided = wide.transpose(-2, -3).contiguous().transpose(-2, -3)[..., ::2]
        leaves.append(strided.copy_(x).requires_grad_())
    output = disentangled_attention(*leaves, positions=BUCKETS)
    assert relative_error(output.detach().double(), expected[0]) < OPERATOR[torch.float32]


@pytest.mark.parametrize("gathered", [False, True])
def test_memory_grows_with_the_length_not_its_square(
    gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_BLOCK_ELEMENTS", 1 << 12)
    monkeypatch.setattr(position_terms, "STRIP", 16)
    monkeypatch.setattr(position_terms, "_KEY_STRIP", 64)
    largest = {}
    for length in (256, 512):
        rows = [
            None if x is None else x[:1, :1].float() if x.dim() == 4 else x[:1].float()
            for x in tensors(length, BUCKETS)
        ]
        q, k, v, pos_key, pos_query = rows
        assert q is not None
        assert k is not None
        q.requires_grad_()
        at = torch.arange(length)[None] if gathered else None
        with LargestTensor() as mode:
            output = disentangled_attention(
                q, k, v, pos_key, pos_query, BUCKETS, q_positions=at, dropout_p=0.1, seed=0
            )  # type: ignore[arg-type]
            torch.autograd.grad(output.sum(), q)
        largest[length] = mode.elements
    assert largest[512] <= 2.1 * largest[256]
    assert largest[512] < 512 * 512 / 8


@pytest.mark.parametrize("which", list(itertools.combinations(range(5), 2)))
def test_gradients_of_some_inputs_only(which: tuple[int, ...]) -> None:
    inputs = [x.float() for x in tensors(10, BUCKETS) if x is not None]
    every = run(list(inputs), torch.float32, BUCKETS)[2:]
    leaves = [x.requires_grad_(index in which) for index, x in enumerate(inputs)]
    output = disentangled_attention(*leaves, positions=BUCKETS)
    chosen = [leaves[index] for index in which]
    gradients = torch.autograd.grad(output, chosen, fixed_projection(output))
    for index, gradient in zip(which, gradients, strict=True):
        assert torch.equal(gradient.double(), every[index])

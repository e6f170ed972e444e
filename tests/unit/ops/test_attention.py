"""The chunked backend against the float64 reference: every feature, outputs and gradients."""

from __future__ import annotations

import itertools
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
from tests.support.attention import assert_later_tokens_do_not_matter
from tests.support.memory import LargestTensor
from tests.support.tolerances import OPERATOR

LINEAR, BUCKETS = RelativePositions(16, 0), RelativePositions(16, 8)
BATCH, HEADS, SIZE = 2, 3, 8


def tensors(
    length: int,
    positions: RelativePositions,
    *,
    tables: str = "both",
    gathered: int | None = None,
    seed: int = 0,
) -> list[Tensor | None]:
    """Return float64 q, k, v, pos_key and pos_query."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q = normal(BATCH, HEADS, length if gathered is None else gathered, SIZE)
    k, v = normal(BATCH, HEADS, length, SIZE), normal(BATCH, HEADS, length, SIZE)
    pos_key, pos_query = (normal(HEADS, 2 * positions.span, SIZE) for _ in range(2))
    return [
        q,
        k,
        v,
        pos_key if tables in ("both", "c2p") else None,
        pos_query if tables in ("both", "p2c") else None,
    ]


def run(
    inputs: list[Tensor | None], dtype: torch.dtype, positions: RelativePositions, **options: Any
) -> list[Tensor]:
    """Return output, log-sum-exp and the gradients of a fixed projection of the output."""
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in inputs]
    q, k, v, pos_key, pos_query = leaves
    assert q is not None
    output, lse = disentangled_attention(
        q, k, v, pos_key, pos_query, positions, return_lse=True, **options
    )
    assert output.dtype == dtype
    assert lse.dtype == torch.float32
    assert not lse.requires_grad
    generator = torch.Generator().manual_seed(9)
    d_output = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype)
    gradients = torch.autograd.grad(output, [x for x in leaves if x is not None], d_output)
    return [x.detach().double() for x in (output, lse, *gradients)]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert torch.equal(torch.isinf(actual), torch.isinf(expected))
    actual, expected = (x.nan_to_num(posinf=0.0, neginf=0.0) for x in (actual, expected))
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-6))


def assert_chunked_matches(
    inputs: list[Tensor | None], positions: RelativePositions, **options: Any
) -> None:
    expected = run(inputs, torch.float64, positions, backend="reference", **options)
    for dtype in (torch.float32, torch.float64):
        actual = run(inputs, dtype, positions, backend="chunked", **options)
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            # The log-sum-exp is float32 whatever the inputs are.
            limit = OPERATOR[torch.float32 if index == 1 else dtype]
            assert relative_error(a, e) < limit, f"{dtype}, result {index}"


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
        monkeypatch.setitem(chunked._BLOCK_ELEMENTS, "cpu", 7 * 37)
        monkeypatch.setattr(position_terms, "STRIP", 5)
        monkeypatch.setattr(position_terms, "_KEY_STRIP", 11)


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"attention_mask": torch.arange(37) < torch.tensor([[37], [20]])},
    "padding before": {"attention_mask": torch.arange(37) >= torch.tensor([[3], [0]])},
    "nothing real": {"attention_mask": torch.arange(37) < torch.tensor([[37], [0]])},
    "documents": {"document_ids": torch.stack([torch.arange(37) // 13, torch.arange(37) // 5])},
    "causal": {"causal": True},
    "everything": {
        "causal": True,
        "document_ids": (torch.arange(37) // 9).expand(2, -1),
        "attention_mask": torch.arange(37) < torch.tensor([[30], [1]]),
    },
}
GATHERED = {
    "consecutive": None,
    "gathered": torch.tensor([[0, 36, 7, 7, 7, 20], [5, -1, 3, 36, -1, -1]]),
}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("positions", [LINEAR, BUCKETS], ids=["linear", "buckets"])
@pytest.mark.parametrize("p2c_index", ["microsoft", "paper"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", GATHERED)
def test_every_mask(positions: RelativePositions, p2c_index: str, mask: str, queries: str) -> None:
    q_positions = GATHERED[queries]
    inputs = tensors(37, positions, gathered=None if q_positions is None else 6)
    options = {**MASKS[mask], "q_positions": q_positions, "p2c_index": p2c_index}
    assert_chunked_matches(inputs, positions, dropout_p=0.2, seed=3, head_offset=4, **options)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("tables", ["both", "c2p", "p2c", "none"])
@pytest.mark.parametrize("queries", GATHERED)
def test_every_ablation(tables: str, queries: str) -> None:
    q_positions = GATHERED[queries]
    gathered = None if q_positions is None else 6
    inputs = tensors(37, BUCKETS, tables=tables, gathered=gathered)
    assert_chunked_matches(inputs, BUCKETS, q_positions=q_positions)


@pytest.mark.parametrize("length", [1, 2, 15, 129, 261])
@pytest.mark.parametrize("gathered", [False, True])
def test_odd_lengths(length: int, gathered: bool) -> None:
    count = (length + 4) // 5
    q_positions = torch.arange(length).repeat(2, 1)[:, ::5] if gathered else None
    inputs = tensors(length, BUCKETS, gathered=count if gathered else None)
    seed = torch.tensor([-5, 1 << 50])
    assert_chunked_matches(inputs, BUCKETS, q_positions=q_positions, dropout_p=0.1, seed=seed)


def test_zero_gathered_queries() -> None:
    inputs = tensors(9, BUCKETS, gathered=0)
    results = run(inputs, torch.float32, BUCKETS, q_positions=torch.zeros(2, 0, dtype=torch.int64))
    assert results[0].shape == (BATCH, HEADS, 0, SIZE)
    assert all(not gradient.any() for gradient in results[3:])


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_gathered_queries_equal_the_full_ones_selected(backend: str) -> None:
    at = torch.tensor([[3, 30, 12], [0, 36, 36]])
    inputs = tensors(37, LINEAR)
    q = inputs[0]
    assert q is not None
    picked = q.gather(2, at[:, None, :, None].expand(-1, HEADS, -1, SIZE))
    options: dict[str, Any] = {"dropout_p": 0.3, "seed": 8, "causal": True, "backend": backend}
    full = run(inputs, torch.float64, LINEAR, **options)[0]
    some = run([picked, *inputs[1:]], torch.float64, LINEAR, q_positions=at, **options)[0]
    expected = full.gather(2, at[:, None, :, None].expand(-1, HEADS, -1, SIZE))
    assert relative_error(some, expected) < OPERATOR[torch.float64]


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("queries", GATHERED)
def test_causal_outputs_do_not_depend_on_later_tokens(backend: str, queries: str) -> None:
    q_positions = GATHERED[queries]
    inputs = tensors(37, BUCKETS, gathered=None if q_positions is None else 6)
    assert_later_tokens_do_not_matter(inputs, BUCKETS, q_positions, torch.float64, backend=backend)


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


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_packed_documents_equal_separate_ones(backend: str) -> None:
    inputs = tensors(30, LINEAR)
    cut = 11
    packed = run(
        inputs,
        torch.float64,
        LINEAR,
        document_ids=(torch.arange(30) >= cut).long().expand(2, -1),
        backend=backend,
    )[0]
    for part in (slice(0, cut), slice(cut, 30)):
        alone: list[Tensor | None] = [x if x is None else x[:, :, part] for x in inputs[:3]]
        separate = run([*alone, *inputs[3:]], torch.float64, LINEAR, backend=backend)[0]
        assert relative_error(packed[:, :, part], separate) < OPERATOR[torch.float64]


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_tensor_parallel_heads_drop_the_same_elements(backend: str) -> None:
    inputs = tensors(20, BUCKETS)
    options: dict[str, Any] = {"dropout_p": 0.5, "seed": 2, "backend": backend}
    whole = run(inputs, torch.float64, BUCKETS, **options)[0]
    local = [None if x is None else x[:, 1:] if x.dim() == 4 else x[1:] for x in inputs]
    part = run(local, torch.float64, BUCKETS, head_offset=1, **options)[0]
    assert relative_error(part, whole[:, 1:]) < OPERATOR[torch.float64]


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
    generator = torch.Generator().manual_seed(9)
    d_output = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype)
    gradients = torch.autograd.grad(output, (q, k, v, pos_key, pos_query), d_output)
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


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_float16_survives_scores_of_60000(backend: str) -> None:
    q, k, v, pos_key, pos_query = tensors(33, BUCKETS)
    assert q is not None
    assert k is not None
    q, k = q.sign() * 87, k.sign() * 87  # 8 products of 87 * 87 are 60,552
    k[:, :, ::2] *= -1
    options: dict[str, Any] = {"scale": 1.0, "backend": backend}
    inputs = [q, k, v, pos_key, pos_query]
    expected = run(inputs, torch.float64, BUCKETS, scale=1.0, backend="reference")
    actual = run(inputs, torch.float16, BUCKETS, **options)
    assert all(torch.isfinite(x).all() for x in actual)
    assert relative_error(actual[1], expected[1]) < OPERATOR[torch.float16]


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "none"])
def test_float16_survives_scores_of_60000_under_every_mask(mask: str) -> None:
    q, k, v, pos_key, pos_query = tensors(37, BUCKETS)
    assert q is not None
    assert k is not None
    inputs = [q.sign() * 87, k.sign() * 87, v, pos_key, pos_query]
    inputs = [None if x is None else x.half().double() for x in inputs]
    options: dict[str, Any] = {**MASKS[mask], "scale": 1.0, "dropout_p": 0.2, "seed": 3}
    expected = run(inputs, torch.float64, BUCKETS, backend="reference", **options)
    actual = run(inputs, torch.float16, BUCKETS, backend="chunked", **options)
    for a, e in zip(actual[:2], expected[:2], strict=True):
        assert relative_error(a, e) < OPERATOR[torch.float16]
    assert all(torch.isfinite(x).all() for x in actual[2:])


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
        generator = torch.Generator().manual_seed(9)
        d_output = torch.randn(output.shape, generator=generator, dtype=torch.float64).float()
        gradients = torch.autograd.grad(output, leaves, d_output)
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
    monkeypatch.setitem(chunked._BLOCK_ELEMENTS, "cpu", 1 << 12)
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
    generator = torch.Generator().manual_seed(9)
    d_output = torch.randn(output.shape, generator=generator, dtype=torch.float64).float()
    gradients = torch.autograd.grad(output, [leaves[index] for index in which], d_output)
    for index, gradient in zip(which, gradients, strict=True):
        assert torch.equal(gradient.double(), every[index])

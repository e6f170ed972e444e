"""The fused kernels against the float64 reference: every feature, outputs and gradients.

Without a GPU they run in Triton's interpreter, whose bfloat16 arithmetic is wrong. Tiles are small,
so that a few dozen positions give near, far and partial tiles.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_deberta.ops import RelativePositions, disentangled_attention
from tests.support.attention import (
    Inputs,
    assert_later_tokens_do_not_matter,
    random_inputs,
    relative_error,
    run_attention,
)
from tests.support.tolerances import OPERATOR

pytest.importorskip("triton", reason="the fused kernels are written in Triton")
from megatron_deberta.ops.triton import settings as triton_settings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 16
# Two whole tiles and a partial one; distances between the first and the last are far.
LENGTH = 2 * TILE + 5
LINEAR, BUCKETS, WIDE = RelativePositions(5, 0), RelativePositions(12, 4), RelativePositions(99, 6)
GATHERED = torch.tensor([[0, 7, 20, 20, 20, 36, 35], [5, -1, 3, 26, -1, 33, 18]])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in triton_settings.TILES:
        monkeypatch.setitem(triton_settings.TILES, dtype, TILE)


def masks(length: int) -> dict[str, dict[str, Any]]:
    """Return every kind of mask for two rows."""
    at = torch.arange(length)
    return {
        "none": {},
        "padding": {"attention_mask": at < torch.tensor([[length], [length // 3]])},
        "padding before": {"attention_mask": at >= torch.tensor([[length // 2], [0]])},
        "nothing real": {"attention_mask": at < torch.tensor([[length], [0]])},
        "documents": {"document_ids": torch.stack([at // 15, at // 5])},
        "causal": {"causal": True},
        "everything": {
            "causal": True,
            "document_ids": (at // 19).expand(2, -1),
            "attention_mask": at < torch.tensor([[length - 5], [1]]),
        },
    }


def assert_matches_reference(
    inputs: Inputs, positions: RelativePositions, dtype: torch.dtype, **options: Any
) -> None:
    expected = run_attention(inputs, torch.float64, positions, backend="reference", **options)
    actual = run_attention(inputs, dtype, positions, device=DEVICE, backend="triton", **options)
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert relative_error(a, e) < OPERATOR[dtype], f"{dtype}, result {index}"


@pytest.mark.parametrize("mask", masks(1))
def test_every_mask(mask: str) -> None:
    options = masks(LENGTH)[mask]
    inputs = random_inputs((2, 1, LENGTH, 32), LINEAR)
    assert_matches_reference(
        inputs, LINEAR, torch.float16, dropout_p=0.2, seed=3, head_offset=4, **options
    )


@pytest.mark.parametrize("positions", [LINEAR, BUCKETS, WIDE], ids=["linear", "buckets", "wide"])
@pytest.mark.parametrize("p2c_index", ["microsoft", "paper"])
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_every_distance(positions: RelativePositions, p2c_index: str, dtype: torch.dtype) -> None:
    inputs = random_inputs((1, 1, 3 * TILE, 32), positions)
    assert_matches_reference(inputs, positions, dtype, p2c_index=p2c_index)


@pytest.mark.parametrize("tables", ["c2p", "p2c", "none"])
def test_every_ablation(tables: str) -> None:
    inputs = random_inputs((1, 1, LENGTH, 32), LINEAR, tables=tables)
    assert_matches_reference(inputs, LINEAR, torch.float16)


@pytest.mark.parametrize(
    ("size", "gathered"),
    [
        (64, True), (128, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((64, False), (128, True))),
    ],
)  # fmt: skip
def test_every_head_size(size: int, gathered: bool) -> None:
    at = GATHERED[:1] if gathered else None
    inputs = random_inputs((1, 1, LENGTH, size), LINEAR, gathered=7 if gathered else None)
    assert_matches_reference(inputs, LINEAR, torch.float16, dropout_p=0.1, seed=1, q_positions=at)


@pytest.mark.parametrize("length", [1, 2, 15, 17, 48])
def test_odd_lengths(length: int) -> None:
    inputs = random_inputs((2, 1, length, 32), LINEAR)
    seed = torch.tensor([-5, 1 << 50])
    assert_matches_reference(inputs, LINEAR, torch.float32, dropout_p=0.1, seed=seed)


def test_two_passes_give_the_same_bits_and_so_does_recomputation() -> None:
    options: dict[str, Any] = {"dropout_p": 0.3, "seed": 5, "backend": "triton", "causal": True}
    inputs = random_inputs((1, 1, 40, 32), LINEAR)
    first = run_attention(inputs, torch.float16, LINEAR, device=DEVICE, **options)
    again = run_attention(inputs, torch.float16, LINEAR, device=DEVICE, **options)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    leaves = [x.to(DEVICE, torch.float16).requires_grad_() for x in inputs if x is not None]

    def attend(*x: Tensor) -> Tensor:
        return disentangled_attention(*x, positions=LINEAR, **options)

    output = checkpoint(attend, *leaves, use_reentrant=False)
    generator = torch.Generator().manual_seed(9)
    d_output = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    gradients = torch.autograd.grad(output, leaves, d_output)
    for a, b in zip((output.detach(), *gradients), (first[0], *first[2:]), strict=True):
        assert torch.equal(a.cpu().double(), b)


@pytest.mark.parametrize(
    ("mask", "positions"),
    [
        ("none", LINEAR), ("everything", LINEAR), ("causal", WIDE), ("documents", WIDE),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("none", WIDE), ("everything", WIDE), ("causal", LINEAR), ("documents", LINEAR)
            )
        ),
    ],
    ids=lambda case: case if isinstance(case, str) else "linear" if case is LINEAR else "wide",
)  # fmt: skip
def test_gathered_queries(mask: str, positions: RelativePositions) -> None:
    """Queries in any order, repeated and padding, within and beyond the table."""
    dtype = torch.float32 if mask == "none" else torch.float16
    inputs = random_inputs((2, 1, LENGTH, 32), positions, gathered=7)
    options = {**masks(LENGTH)[mask], "q_positions": GATHERED, "p2c_index": "paper"}
    # With some seeds a query keeps one visible key, and all its score gradient is rounding error.
    assert_matches_reference(inputs, positions, dtype, dropout_p=0.2, seed=4, **options)


def test_packed_documents_equal_separate_ones() -> None:
    inputs = random_inputs((1, 1, LENGTH, 32), LINEAR)
    cut = 19
    documents = (torch.arange(LENGTH) >= cut).long()[None]
    options: dict[str, Any] = {"backend": "triton", "device": DEVICE}
    packed = run_attention(inputs, torch.float32, LINEAR, document_ids=documents, **options)[0]
    for part in (slice(0, cut), slice(cut, LENGTH)):
        alone: Inputs = [None if x is None else x[:, :, part] for x in inputs[:3]]
        alone = [*alone, *inputs[3:]]
        separate = run_attention(alone, torch.float32, LINEAR, **options)[0]
        assert relative_error(packed[:, :, part], separate) < OPERATOR[torch.float32]


def test_values_of_padding_do_not_matter() -> None:
    inputs = random_inputs((1, 1, LENGTH, 32), LINEAR)
    real = torch.arange(LENGTH)[None] < 25
    options: dict[str, Any] = {"backend": "triton", "device": DEVICE, "attention_mask": real}
    first = run_attention(inputs, torch.float32, LINEAR, **options)
    other = [x if x is None else x.clone() for x in inputs]
    for x in other[1:3]:
        assert x is not None
        x[:, :, 25:] = 1e4
    second = run_attention(other, torch.float32, LINEAR, **options)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_causal_equals_the_row_cut_short() -> None:
    inputs = random_inputs((1, 1, LENGTH, 32), LINEAR)
    options: dict[str, Any] = {"backend": "triton", "device": DEVICE, "causal": True}
    whole = run_attention(inputs, torch.float32, LINEAR, **options)[0]
    cut: Inputs = [None if x is None else x[:, :, :20] for x in inputs[:3]]
    short = run_attention([*cut, *inputs[3:]], torch.float32, LINEAR, **options)[0]
    assert relative_error(whole[:, :, :20], short) < OPERATOR[torch.float32]


@pytest.mark.parametrize("gathered", [False, True])
def test_causal_outputs_do_not_depend_on_later_tokens(gathered: bool) -> None:
    inputs = random_inputs((2, 1, 53, 32), LINEAR, gathered=7 if gathered else None)
    at = GATHERED if gathered else None
    assert_later_tokens_do_not_matter(
        inputs, LINEAR, at, torch.float32, device=DEVICE, backend="triton"
    )


@pytest.mark.slow
def test_tensor_parallel_halves_equal_the_whole() -> None:
    inputs = random_inputs((1, 2, 33, 32), LINEAR)
    options: dict[str, Any] = {"backend": "triton", "device": DEVICE, "dropout_p": 0.5, "seed": 2}
    whole = run_attention(inputs, torch.float16, LINEAR, **options)
    local: Inputs = [None if x is None else x[:, 1:] if x.dim() == 4 else x[1:] for x in inputs]
    part = run_attention(local, torch.float16, LINEAR, head_offset=1, **options)
    assert torch.equal(part[0], whole[0][:, 1:])
    assert torch.equal(part[1], whole[1][:, 1:])


def test_any_strides() -> None:
    inputs = random_inputs((1, 1, 20, 32), LINEAR)
    options: dict[str, Any] = {"backend": "triton", "positions": LINEAR}
    leaves, strided = [], []
    for x in inputs:
        assert x is not None
        leaf = x.to(DEVICE, torch.float16)
        wide = torch.zeros(*x.shape[:-1], 64, dtype=torch.float16, device=DEVICE)
        transposed = wide.transpose(-2, -3).contiguous().transpose(-2, -3)[..., ::2]
        leaves.append(leaf.requires_grad_())
        strided.append(transposed.copy_(leaf.detach()).requires_grad_())
    results = []
    for tensors in (leaves, strided):
        output = disentangled_attention(*tensors, **options)
        gradient = output.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
        results.append([output, *torch.autograd.grad(output, tensors, gradient)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_of_one_product_stand_in_one_buffer() -> None:
    """And have the same bits; the projections' backward then copies nothing."""
    q, k, v, *tables = random_inputs((2, 3, 20, 32), LINEAR)
    leaves = [x.to(DEVICE, torch.float16).requires_grad_() for x in (q, k, v)]
    tables = [x.to(DEVICE, torch.float16) for x in tables if x is not None]
    product = torch.stack([x.detach().transpose(1, 2) for x in leaves], 2).requires_grad_()
    parts = [x.transpose(1, 2) for x in product.unbind(2)]
    options: dict[str, Any] = {"backend": "triton", "positions": LINEAR, "causal": True}
    results = []
    for tensors in (leaves, parts):
        output = disentangled_attention(*tensors, *tables, **options)
        results.append([output, *torch.autograd.grad(output.square().sum(), tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    places = [(x.untyped_storage().data_ptr(), x.storage_offset()) for x in results[1][1:]]
    assert places == [(places[0][0], number * 3 * 32) for number in range(3)]


@pytest.mark.parametrize("gathered", [False, True])
def test_custom_operators_pass_opcheck(gathered: bool) -> None:
    """Fake tensors, gradients and schema, on which ``torch.compile`` relies."""
    from megatron_deberta.ops.triton import backend as triton_backend

    inputs = random_inputs((1, 1, 18, 32), LINEAR, gathered=5 if gathered else None)
    leaves = [x.to(DEVICE, torch.float32).requires_grad_() for x in inputs if x is not None]
    ranges = None
    if gathered:
        at = torch.tensor([[3, 17, -1, 0, 9]], device=DEVICE)
        ranges = triton_backend.gathered_ranges(at, None, 18)
    seed = torch.tensor([3], device=DEVICE)
    options = (seed, gathered, LINEAR.max_distance, LINEAR.buckets, False, 0.1, 0, 0.1)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        triton_backend._forward_op, (*leaves, ranges, *options), test_utils=checks
    )


def test_compiles_without_graph_break() -> None:
    inputs = random_inputs((1, 1, 18, 32), LINEAR)
    leaves = [x.to(DEVICE, torch.float32).requires_grad_() for x in inputs if x is not None]

    def attend(*x: Tensor) -> Tensor:
        return disentangled_attention(*x, positions=LINEAR, causal=True, backend="triton") * 2

    traced = torch.compile(attend, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(attend(*leaves).sum(), leaves)
    actual = torch.autograd.grad(traced(*leaves).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("scale", [0.0, -0.1])
def test_scales_that_reverse_the_order_of_scores_are_refused(scale: float) -> None:
    inputs = [x for x in random_inputs((1, 1, 16, 32), LINEAR) if x is not None]
    with pytest.raises(ValueError, match="scale: got .*, expected above 0"):
        disentangled_attention(
            *(x.to(DEVICE, torch.float16) for x in inputs), LINEAR, scale=scale, backend="triton"
        )

"""The fused kernels against the float64 reference: every feature, outputs and gradients.

Without a GPU they run in Triton's interpreter, whose bfloat16 arithmetic is wrong. Tiles are small,
so that a few dozen positions give near, far and partial tiles.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_deberta.ops import RelativePositions, disentangled_attention, dispatch
from tests.support.attention import (
    GATHERED,
    LENGTH,
    MASKS,
    assert_later_tokens_do_not_matter,
    assert_matches_reference,
    fixed_projection,
    random_inputs,
    run_attention,
)

pytest.importorskip("triton", reason="the fused kernels are written in Triton")
from megatron_deberta.ops.triton import gathered as gathered_kernels
from megatron_deberta.ops.triton import settings as triton_settings
from tests.support.selection import every

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 16
# Two whole tiles and a partial one; distances between the first and the last are far.
assert LENGTH == 2 * TILE + 5
LINEAR, BUCKETS, WIDE = RelativePositions(5, 0), RelativePositions(12, 4), RelativePositions(99, 6)
AT = GATHERED["gathered"]
assert_matches = partial(assert_matches_reference, backend="triton", device=DEVICE)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in triton_settings.TILES:
        monkeypatch.setitem(triton_settings.TILES, dtype, TILE)


@pytest.mark.parametrize("mask", every(2, MASKS))
def test_every_mask(mask: str) -> None:
    options = {"dropout_p": 0.2, "seed": 3, "head_offset": 4, **MASKS[mask]}
    assert_matches((2, 1, LENGTH, 32), LINEAR, torch.float16, **options)


@pytest.mark.parametrize("positions", [LINEAR, BUCKETS, WIDE], ids=["linear", "buckets", "wide"])
@pytest.mark.parametrize("p2c_index", ["microsoft", pytest.param("paper", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_every_distance(positions: RelativePositions, p2c_index: str, dtype: torch.dtype) -> None:
    assert_matches((1, 1, 3 * TILE, 32), positions, dtype, p2c_index=p2c_index)


@pytest.mark.parametrize("tables", ["c2p", "p2c", "none"])
def test_every_ablation(tables: str) -> None:
    assert_matches((1, 1, LENGTH, 32), LINEAR, torch.float16, tables=tables)


@pytest.mark.parametrize(
    ("size", "gathered"),
    [
        (64, True), (128, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((64, False), (128, True))),
    ],
)  # fmt: skip
def test_every_head_size(size: int, gathered: bool) -> None:
    options = {"q_positions": AT[:1] if gathered else None, "dropout_p": 0.1, "seed": 1}
    assert_matches((1, 1, LENGTH, size), LINEAR, torch.float16, **options)


@pytest.mark.parametrize(
    "length", [1, 15, 17, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 48))]
)
def test_odd_lengths(length: int) -> None:
    seed = torch.tensor([-5, 1 << 50])
    assert_matches((2, 1, length, 32), LINEAR, torch.float32, dropout_p=0.1, seed=seed)


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
    gradients = torch.autograd.grad(output, leaves, fixed_projection(output))
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
    options = {**MASKS[mask], "q_positions": AT, "p2c_index": "paper"}
    # With some seeds a query keeps one visible key, and all its score gradient is rounding error.
    assert_matches((2, 1, LENGTH, 32), positions, dtype, dropout_p=0.2, seed=4, **options)


@pytest.mark.parametrize("mask", ["none", "everything"])
def test_queries_at_distinct_positions_are_spread_over_the_row(
    mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order and with padding, by the kernels of consecutive queries."""
    monkeypatch.setattr(gathered_kernels, "forward", None)
    at = torch.tensor([[36, 3, 20, 0, 5, 19, 4], [1, -1, 30, 16, -1, 2, 31]])
    options = {**MASKS[mask], "q_positions": at, "distinct_positions": True}
    assert_matches((2, 1, LENGTH, 32), LINEAR, torch.float16, dropout_p=0.2, seed=4, **options)


@pytest.mark.parametrize("gathered", [False, True])
def test_causal_outputs_do_not_depend_on_later_tokens(gathered: bool) -> None:
    at = AT if gathered else None
    inputs = random_inputs((2, 1, 53, 32), LINEAR, gathered=at)
    assert_later_tokens_do_not_matter(
        inputs, LINEAR, at, torch.float32, device=DEVICE, backend="triton"
    )


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


@pytest.mark.parametrize("gathered", [False, True])
def test_memory_beyond_the_length_does_not_matter(gathered: bool) -> None:
    """Rows after the last one, in a partial tile, are other memory; here NaN."""
    at = AT[:1] if gathered else None
    options: dict[str, Any] = {"backend": "triton", "positions": LINEAR, "q_positions": at}
    inputs = random_inputs((1, 1, LENGTH, 32), LINEAR, gathered=at)
    leaves, padded = [], []
    for x in inputs[:3]:
        assert x is not None
        leaf = x.to(DEVICE, torch.float16)
        behind = torch.full((1, 1, TILE, 32), float("nan"), dtype=torch.float16, device=DEVICE)
        leaves.append(leaf.requires_grad_())
        padded.append(torch.cat([leaf.detach(), behind], 2)[:, :, : leaf.size(2)].requires_grad_())
    tables = [x.to(DEVICE, torch.float16).requires_grad_() for x in inputs[3:] if x is not None]
    results = []
    for tensors in (leaves, padded):
        output = disentangled_attention(*tensors, *tables, **options)
        gradient = torch.cat([fixed_projection(output), torch.full_like(output, float("nan"))], 2)
        gradient = gradient[:, :, : output.size(2)]
        results.append([output, *torch.autograd.grad(output, [*tensors, *tables], gradient)])
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
        ranges = triton_backend.placement(at, None, 18)
    seed = torch.tensor([3], device=DEVICE)
    options = (seed, gathered, LINEAR.max_distance, LINEAR.buckets, False, 0.1, 0, 0.1)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        triton_backend._forward_op, (*leaves, ranges, *options), test_utils=checks
    )


@pytest.mark.parametrize("spread", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiles_without_graph_break(spread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs((1, 1, 18, 32), LINEAR, gathered=3 if spread else None)
    leaves = [x.to(DEVICE, torch.float16).requires_grad_() for x in inputs if x is not None]
    options: dict[str, Any] = {"causal": True, "backend": "triton"}
    if spread:
        options |= {"q_positions": torch.tensor([[9, 2, -1]]), "distinct_positions": True}
        # On the CPU alone values are read, which breaks the graph.
        monkeypatch.setattr(dispatch, "check_arguments", lambda _: None)

    def attend(*x: Tensor) -> Tensor:
        return disentangled_attention(*x, positions=LINEAR, **options) * 2

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

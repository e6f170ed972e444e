"""The fused kernels against the float64 reference: every feature, outputs and gradients.

Without a GPU they run in Triton's interpreter, whose bfloat16 arithmetic is wrong. Tiles are small
there, so that a few dozen positions make near tiles, far tiles and torn ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_deberta.ops import RelativePositions, disentangled_attention
from tests.support.attention import Inputs, random_inputs, relative_error, run_attention
from tests.support.tolerances import OPERATOR

pytest.importorskip("triton", reason="the fused kernels are written in Triton")
from megatron_deberta.ops import triton_settings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 16
LINEAR, BUCKETS, WIDE = RelativePositions(5, 0), RelativePositions(12, 4), RelativePositions(99, 6)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in triton_settings.TILES:
        monkeypatch.setitem(triton_settings.TILES, dtype, TILE)


def masks(length: int) -> dict[str, dict[str, Any]]:
    """Every kind of mask for two rows."""
    at = torch.arange(length)
    return {
        "none": {},
        "padding": {"key_padding": at < torch.tensor([[length], [length // 3]])},
        "padding before": {"key_padding": at >= torch.tensor([[length // 2], [0]])},
        "nothing real": {"key_padding": at < torch.tensor([[length], [0]])},
        "documents": {"document_ids": torch.stack([at // 23, at // 5])},
        "causal": {"causal": True},
        "everything": {
            "causal": True,
            "document_ids": (at // 29).expand(2, -1),
            "key_padding": at < torch.tensor([[length - 5], [1]]),
        },
    }


def assert_right(
    inputs: Inputs, positions: RelativePositions, dtype: torch.dtype, **options: Any
) -> None:
    expected = run_attention(inputs, torch.float64, positions, backend="reference", **options)
    actual = run_attention(inputs, dtype, positions, device=DEVICE, backend="triton", **options)
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert relative_error(a, e) < OPERATOR[dtype], f"{dtype}, result {index}"


@pytest.mark.parametrize("mask", masks(1))
def test_every_mask(mask: str) -> None:
    options = masks(53)[mask]
    inputs = random_inputs((2, 1, 53, 32), LINEAR)
    assert_right(inputs, LINEAR, torch.float16, dropout_p=0.2, seed=3, head_offset=4, **options)


@pytest.mark.parametrize("positions", [LINEAR, BUCKETS, WIDE], ids=["linear", "buckets", "wide"])
@pytest.mark.parametrize("p2c_index", ["released", "paper"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_distance(positions: RelativePositions, p2c_index: str, dtype: torch.dtype) -> None:
    inputs = random_inputs((1, 1, 64, 32), positions)
    assert_right(inputs, positions, dtype, p2c_index=p2c_index)


@pytest.mark.parametrize("tables", ["c2p", "p2c", "none"])
def test_every_ablation(tables: str) -> None:
    inputs = random_inputs((1, 1, 53, 32), LINEAR, tables=tables)
    assert_right(inputs, LINEAR, torch.float16)


@pytest.mark.parametrize("size", [64, 128])
def test_every_head_size(size: int) -> None:
    inputs = random_inputs((1, 1, 37, size), LINEAR)
    assert_right(inputs, LINEAR, torch.float16, dropout_p=0.1, seed=1)


@pytest.mark.parametrize("length", [1, 2, 15, 17, 64])
def test_odd_lengths(length: int) -> None:
    inputs = random_inputs((2, 1, length, 32), LINEAR)
    seed = torch.tensor([-5, 1 << 50])
    assert_right(inputs, LINEAR, torch.float32, dropout_p=0.1, seed=seed)


def test_two_passes_give_the_same_bits_and_so_does_recomputation() -> None:
    options: dict[str, Any] = {"dropout_p": 0.3, "seed": 5, "backend": "triton", "causal": True}
    inputs = random_inputs((3, 1, 40, 32), LINEAR)
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


GATHERED = torch.tensor([[0, 7, 20, 20, 20, 52, 51], [5, -1, 3, 36, -1, 47, 18]])


@pytest.mark.parametrize("mask", ["none", "everything", "documents"])
@pytest.mark.parametrize("positions", [LINEAR, WIDE], ids=["linear", "wide"])
def test_gathered_queries(mask: str, positions: RelativePositions) -> None:
    """In any order, some at the same place, some padding; beyond the table and within."""
    dtype = torch.float32 if mask == "none" else torch.float16
    inputs = random_inputs((2, 1, 53, 32), positions, gathered=7)
    options = {**masks(53)[mask], "q_positions": GATHERED, "p2c_index": "paper"}
    assert_right(inputs, positions, dtype, dropout_p=0.2, seed=3, **options)

"""The fused kernels at the sizes and magnitudes of real runs: GPU tile sizes, far positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from megatron_deberta.ops import RelativePositions
from tests.support.attention import (
    assert_matches_reference,
    random_inputs,
    relative_error,
    run_attention,
)
from tests.support.memory import LargestTensor
from tests.support.selection import every
from tests.support.tolerances import OPERATOR

pytest.importorskip("triton", reason="the fused kernels are written in Triton")
from megatron_deberta.ops.triton import settings as triton_settings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LINEAR, BUCKETS = RelativePositions(5, 0), RelativePositions(40, 8)
assert_matches = partial(assert_matches_reference, backend="triton", device=DEVICE)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (32, torch.float16),
        pytest.param(64, torch.float16, marks=pytest.mark.slow),
        (128, torch.float16),
        (32, torch.float32),
        pytest.param(64, torch.float32, marks=pytest.mark.nightly),
        pytest.param(128, torch.float32, marks=pytest.mark.nightly),
    ],
)
def test_tiles_as_on_a_gpu(size: int, dtype: torch.dtype) -> None:
    """Near, far and partial tiles of 64 (16 in float32), with documents and dropout."""
    tile = triton_settings.TILES[dtype]
    # The fewest tiles of which the first and the last are far: their distances exceed the table's.
    length = (BUCKETS.max_distance // tile + 3) * tile - 5
    options = {
        "dropout_p": 0.1,
        "seed": 3,
        "document_ids": (torch.arange(length) >= length - 30).long()[None],
    }
    assert_matches((1, 1, length, size), BUCKETS, dtype, **options)


@pytest.mark.parametrize("tables", every(2, ["p2c", "c2p", "none"], ["nightly"]))
def test_gathered_queries_and_far_tiles_without_a_term(
    tables: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(triton_settings.TILES, torch.float16, 16)
    for at in (torch.tensor([[0, 68, 68, 35, -1, 3]]), None):
        options = {"tables": tables, "q_positions": at, "dropout_p": 0.1, "seed": 3}
        assert_matches((1, 1, 69, 32), BUCKETS, torch.float16, **options)


def test_rows_too_long_for_the_kernels_raise() -> None:
    from megatron_deberta.ops.triton.launch import KernelCall, LaunchPlan

    q = torch.empty(1, 1, triton_settings.MAX_POSITIONS, 32, device="meta")
    call = KernelCall(q, q, q, None, None, None, None, False, 512, 0, False, 0.0, 0, 1.0)
    with pytest.raises(ValueError, match="k: got 16777216 positions"):
        LaunchPlan(call)


class NoKernel:
    """Stand-in for a kernel that leaves the buffers unchanged."""

    __name__, arg_names = "none", ()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@pytest.mark.parametrize("gathered", [False, True])
def test_nothing_is_larger_than_the_band(gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest buffer of a pass is 2 x maximum distance + tile numbers per position."""
    from megatron_deberta.ops.triton import consecutive, launch, tables
    from megatron_deberta.ops.triton import gathered as gathered_kernels

    stubs = set()
    for module in (consecutive, gathered_kernels, tables):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, NoKernel())
            stubs.add(name)
    assert len(stubs) == 13
    positions, length = RelativePositions(512, 256), 24528
    k = torch.zeros(1, 1, length, 32, dtype=torch.float16)
    table = torch.zeros(1, 2 * positions.span, 32, dtype=torch.float16)
    at = torch.arange(0, length, 1000)
    q = k[:, :, at] if gathered else k
    ranges = torch.stack([at, at * 0, at * 0 + length])[:, None].int() if gathered else None
    seed = torch.zeros(1, dtype=torch.int64)
    call = launch.KernelCall(
        q, k, k, table, table, ranges, seed, gathered, 512, 256, False, 0.1, 0, 0.1
    )
    module = gathered_kernels if gathered else launch
    with LargestTensor() as largest:
        output, lse2 = module.forward(call)
        module.backward(call, output, lse2, output)
    tile = 32 if gathered else 64
    assert length * 1000 < largest.elements <= (length + tile) * (2 * 512 + tile)


def test_scores_of_sixty_thousand_in_float16() -> None:
    """Unscaled position terms exceed the float16 range."""
    inputs = random_inputs((1, 1, 53, 64), LINEAR)
    large = [None if x is None else (x * (150 if i != 2 else 1)) for i, x in enumerate(inputs)]
    expected = run_attention(large, torch.float64, LINEAR, backend="reference")
    actual = run_attention(large, torch.float16, LINEAR, device=DEVICE, backend="triton")
    assert expected[1].max() > 60000
    q, _, _, pos_key, _ = large
    assert q is not None
    assert pos_key is not None
    assert torch.einsum("bhqd,htd->bhqt", q, pos_key).abs().max() > 4 * 65504
    assert all(x.isfinite().all() for x in actual)
    assert relative_error(actual[1], expected[1]) < OPERATOR[torch.float16]
    # Terms are known to 16, of 60,000; keys that win by less may change places.
    same = ((actual[0] - expected[0]).abs().amax(-1) < 1e-2).double().mean()
    assert same > 0.9


@pytest.mark.parametrize("tables", every(3, ["both", "c2p", "p2c"], ["slow"]))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_position_products_beyond_the_float16_range(
    tables: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of 76,800 common to all distances, which softmax ignores, do not overflow."""
    monkeypatch.setitem(triton_settings.TILES, dtype, 16)
    inputs = random_inputs((1, 1, 37, 64), LINEAR, tables=tables)
    q, k, _, pos_key, pos_query = inputs
    assert q is not None
    assert k is not None
    for feature, content, other, table in ((0, q, k, pos_key), (1, k, q, pos_query)):
        content[..., feature], other[..., feature] = 256, 0
        if table is not None:
            table.zero_()
            table[..., feature] = 300
    options = {"dropout_p": 0.1, "seed": 3}
    expected = run_attention(inputs, torch.float64, LINEAR, backend="reference", **options)
    actual = run_attention(inputs, dtype, LINEAR, device=DEVICE, backend="triton", **options)
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        # Gradients of q and k in these features are zero: sums of 300 times something rounded.
        first = 2 if index in (2, 3) else 0
        assert relative_error(a[..., first:], e[..., first:]) < OPERATOR[torch.float16]

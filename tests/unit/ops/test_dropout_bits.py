"""Dropout bits against test vectors, an implementation in Python integers, and statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_deberta.ops.dropout_bits import (
    keep_mask,
    keep_scale,
    mix_seed,
    random_bytes,
    row_keys,
)

MASK_32 = (1 << 32) - 1
MASK_64 = (1 << 64) - 1
# (seed, global head, query, key), byte. Fixed before any backend: they may never change.
BYTE_VECTORS = [
    ((0, 0, 0, 0), 17),
    ((0, 0, 0, 1), 117),
    ((0, 0, 0, 2), 170),
    ((0, 0, 0, 3), 14),
    ((0, 0, 0, 4), 172),
    ((1, 0, 0, 0), 141),
    ((0, 1, 0, 0), 168),
    ((0, 0, 1, 0), 68),
    ((-1, 23, 511, 767), 92),
    ((0x123456789ABCDEF, 11, 24527, 24527), 86),
    ((-(1 << 63), 0, 0, 0), 59),
    ((1 << 32, 5, 7, 1023), 179),
]
SEED_VECTORS = [
    ((0,), -2152535657050944081),  # SplitMix64's published first output, 0xe220a8397b1dcdaf
    ((1, 2, 3), -3426316478316322125),
    ((-1, 1 << 63), -580606673856880730),
]


def mixed(x: int) -> int:
    x = ((x ^ x >> 16) * 0x7FEB352D) & MASK_32
    x = ((x ^ x >> 15) * 0x846CA68B) & MASK_32
    return x ^ x >> 16


def restated_byte(seed: int, head: int, query: int, key: int) -> int:
    seed &= MASK_64
    row = mixed((seed & MASK_32) ^ 0x9E3779B9)
    for part in (seed >> 32, head, query & MASK_32):
        row = mixed(row ^ part)
    word = mixed(row ^ ((0x9E3779B9 * (key // 4)) & MASK_32))
    return word >> 8 * (key % 4) & 255


def byte_block(seeds: list[int], heads: int, queries: int, keys: int) -> Tensor:
    rows = row_keys(torch.tensor(seeds), torch.arange(queries), heads, 0)
    return random_bytes(rows, keys)


@pytest.mark.parametrize(("where", "expected"), BYTE_VECTORS)
def test_bytes_are_the_fixed_vectors(where: tuple[int, int, int, int], expected: int) -> None:
    seed, head, query, key = where
    assert restated_byte(*where) == expected
    rows = row_keys(torch.tensor([seed]), torch.tensor([query]), 1, head)
    assert random_bytes(rows, 1, key_offset=key).item() == expected


def test_a_block_of_bytes_equals_the_restatement() -> None:
    seeds = [3, -(1 << 40) - 7]
    block = byte_block(seeds, 3, 5, 11)
    for row, seed in enumerate(seeds):
        for head in range(3):
            for query in range(5):
                expected = [restated_byte(seed, head, query, key) for key in range(11)]
                assert block[row, head, query].tolist() == expected


def test_keep_mask_depends_on_global_places_only() -> None:
    seed = torch.tensor([5, 6])
    whole = keep_mask(seed, torch.arange(9), 23, 0.3, num_heads=4)
    heads = keep_mask(seed, torch.arange(9), 23, 0.3, num_heads=2, head_offset=2)
    keys = keep_mask(seed, torch.arange(9), 10, 0.3, num_heads=4, key_offset=7)
    gathered = keep_mask(seed, torch.tensor([[8, 2], [0, -1]]), 23, 0.3, num_heads=4)
    assert torch.equal(heads, whole[:, 2:])
    assert torch.equal(keys, whole[..., 7:17])
    assert torch.equal(gathered[0], whole[0][:, [8, 2]])
    assert torch.equal(gathered[1, :, 0], whole[1][:, 0])


def test_dropped_are_the_bytes_below_the_threshold() -> None:
    keep = keep_mask(torch.tensor([5]), torch.arange(9), 23, 0.1)
    assert torch.equal(keep, byte_block([5], 1, 9, 23) >= 26)
    assert keep_scale(0.1) == 256 / 230
    assert keep_scale(0.0) == 1.0
    assert keep_mask(torch.tensor([5]), torch.arange(9), 23, 0.0).all()


@pytest.mark.parametrize("p", [-0.1, 1.0, 0.999, math.nan])
def test_impossible_probabilities_are_refused(p: float) -> None:
    with pytest.raises(ValueError, match="dropout_p: got"):
        keep_mask(torch.tensor([5]), torch.arange(2), 3, p)


def test_bytes_are_uniform_in_every_byte_of_the_word() -> None:
    block = byte_block([11, 12, 13, 14], 4, 128, 512).long()  # 2**20 bytes
    for byte in range(4):
        counts = torch.bincount(block[..., byte::4].flatten(), minlength=256).double()
        expected = counts.sum() / 256
        chi_squared = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("seeds", [list(range(8)), [1 << 32 + n for n in range(8)]])
def test_neighbours_are_uncorrelated(seeds: list[int]) -> None:
    drop = (byte_block(seeds, 8, 64, 64) < 26).double() - 26 / 256
    variance = 26 / 256 * 230 / 256
    for dim in range(4):
        for step in (1, 2, 4):
            length = drop.shape[dim] - step
            product = drop.narrow(dim, 0, length) * drop.narrow(dim, step, length)
            deviation = float(product.sum()) / variance / math.sqrt(product.numel())
            assert abs(deviation) < 5, f"dimension {dim}, step {step}: {deviation:.1f} sigma"


def test_the_rate_is_right_in_every_row_and_column() -> None:
    drop = (byte_block(list(range(16)), 4, 128, 256) < 26).double()
    rate, count = 26 / 256, drop.numel()
    assert abs(float(drop.mean()) - rate) < 5 * math.sqrt(rate * (1 - rate) / count)
    for dims in ((0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):
        means = drop.mean(dims)
        bound = 5.5 * math.sqrt(rate * (1 - rate) / (count / means.numel()))
        assert float((means - rate).abs().max()) < bound


@pytest.mark.parametrize(("parts", "expected"), SEED_VECTORS)
def test_mix_seed_is_the_fixed_vectors(parts: tuple[int, ...], expected: int) -> None:
    mixed_seed = mix_seed(*parts)
    assert mixed_seed.dtype == torch.int64
    assert mixed_seed.shape == ()
    assert mixed_seed.item() == expected


def test_mix_seed_broadcasts_and_minds_the_order() -> None:
    samples = torch.arange(4)
    assert mix_seed(7, samples, 2).tolist() == [int(mix_seed(7, n, 2)) for n in range(4)]
    assert mix_seed(samples[:, None], samples).shape == (4, 4)
    assert mix_seed(samples[:, None], samples).unique().numel() == 16
    assert mix_seed(1, 2) != mix_seed(2, 1)
    assert samples.tolist() == [0, 1, 2, 3]  # arguments are left alone


@pytest.mark.parametrize(("num_keys", "key_offset"), [(16, 0), (7, 3), (1, 5)])
def test_compiled_bytes_are_the_same(
    num_keys: int, key_offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.tensor([[1, -5], [2**31 - 1, -(2**31)]], dtype=torch.int32)
    expected = random_bytes(rows, num_keys, key_offset)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = random_bytes(rows, num_keys, key_offset)
    assert torch.equal(found, expected.to(found.dtype))

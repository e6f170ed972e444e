"""Dropout bits against test vectors, an implementation in Python integers, and statistics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_deberta.ops import dropout_bits
from megatron_deberta.ops.dropout_bits import (
    attention_keep_mask,
    consecutive_bytes,
    consecutive_keep,
    gathered_bytes,
    gathered_keep,
    keep_mask,
    keep_scale,
    mix_seed,
    pairs,
    pairs_of,
    random_bytes,
    random_words,
    row_keys,
)

MASK_32 = (1 << 32) - 1
MASK_64 = (1 << 64) - 1
# (seed, global head, position, feature), byte. Fixed before any backend: they may never change.
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
# (seed, global head, query, key), byte. The first four share a word.
ATTENTION_VECTORS = [
    ((0, 0, 0, 0), 17),
    ((0, 0, 0, 8), 117),
    ((0, 0, 8, 0), 170),
    ((0, 0, 8, 8), 14),
    ((0, 0, 0, 1), 172),
    ((0, 0, 0, 16), 140),
    ((0, 0, 1, 0), 68),
    ((0, 0, 16, 0), 121),
    ((1, 0, 0, 0), 141),
    ((0, 1, 0, 0), 168),
    ((-1, 23, 511, 767), 92),
    ((0x123456789ABCDEF, 11, 24527, 24527), 255),
    ((-(1 << 63), 0, 0, 0), 59),
    ((1 << 32, 5, 7, 1023), 87),
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


def restated_word(seed: int, head: int, x: int, y: int) -> int:
    seed &= MASK_64
    row = mixed((seed & MASK_32) ^ 0x9E3779B9)
    for part in (seed >> 32, head, x & MASK_32):
        row = mixed(row ^ part)
    return mixed(row ^ ((0x9E3779B9 * y) & MASK_32))


def restated_byte(seed: int, head: int, position: int, feature: int) -> int:
    return restated_word(seed, head, position, feature // 4) >> 8 * (feature % 4) & 255


def restated_attention_byte(seed: int, head: int, query: int, key: int) -> int:
    word = restated_word(seed, head, *(8 * (x // 16) + x % 8 for x in (query, key)))
    return word >> (16 * (query // 8 % 2) + 8 * (key // 8 % 2)) & 255


def byte_block(seeds: list[int], heads: int, positions: int, features: int) -> Tensor:
    rows = row_keys(torch.tensor(seeds), torch.arange(positions), heads, 0)
    return random_bytes(rows, features)


def attention_block(seeds: list[int], heads: int, queries: int, keys: int) -> Tensor:
    at = torch.arange(pairs_of(slice(0, queries)).stop)
    return consecutive_bytes(row_keys(torch.tensor(seeds), at, heads, 0), slice(0, queries), keys)


@pytest.mark.parametrize(("where", "expected"), BYTE_VECTORS)
def test_bytes_are_the_fixed_vectors(where: tuple[int, int, int, int], expected: int) -> None:
    seed, head, position, feature = where
    assert restated_byte(*where) == expected
    rows = row_keys(torch.tensor([seed]), torch.tensor([position]), 1, head)
    assert random_bytes(rows, feature + 1)[0, 0, 0, -1].item() == expected


@pytest.mark.parametrize(("where", "expected"), ATTENTION_VECTORS)
def test_attention_bytes_are_the_fixed_vectors(
    where: tuple[int, int, int, int], expected: int
) -> None:
    seed, head, query, key = where
    assert restated_attention_byte(*where) == expected
    at = torch.tensor([query])
    rows = row_keys(torch.tensor([seed]), pairs(at), 1, head)
    assert gathered_bytes(rows, at, key + 1)[0, 0, 0, -1].item() == expected


def test_a_block_of_bytes_equals_the_restatement() -> None:
    seeds = [3, -(1 << 40) - 7]
    block = byte_block(seeds, 3, 5, 11)
    for row, seed in enumerate(seeds):
        for head in range(3):
            for position in range(5):
                expected = [restated_byte(seed, head, position, at) for at in range(11)]
                assert block[row, head, position].tolist() == expected


def test_a_block_of_attention_bytes_equals_the_restatement() -> None:
    """For consecutive queries that begin and end anywhere, and for gathered ones."""
    seeds = torch.tensor([3, -(1 << 40) - 7])
    for queries, keys in ((slice(0, 19), 37), (slice(21, 40), 16), (slice(9, 10), 1)):
        at = torch.arange(queries.start, queries.stop)
        pairs_at = pairs_of(queries)
        rows = row_keys(seeds, torch.arange(pairs_at.start, pairs_at.stop), 2, 0)
        block = consecutive_bytes(rows, queries, keys)
        gathered = gathered_bytes(row_keys(seeds, pairs(at), 2, 0), at, keys)
        assert torch.equal(block, gathered)
        for threshold in (0, 26, 255):
            keep = consecutive_keep(rows, queries, keys, threshold)
            assert torch.equal(keep, block >= threshold)
            gathered_rows = row_keys(seeds, pairs(at), 2, 0)
            keep = gathered_keep(gathered_rows, at, keys, threshold)
            assert torch.equal(keep, block >= threshold)
        for row, head in itertools.product(range(2), range(2)):
            expected = [
                [restated_attention_byte(int(seeds[row]), head, query, key) for key in range(keys)]
                for query in at.tolist()
            ]
            assert block[row, head].tolist() == expected


def test_many_elements_have_the_bits_of_few() -> None:
    """Few elements are mixed by NumPy, many by torch."""
    rows = row_keys(torch.tensor([5, -7]), torch.arange(600), 2, 0)
    at_once = random_words(rows, 30)
    assert at_once.numel() > 2 * dropout_bits._ONE_THREAD
    by_row = [random_words(row, 30) for row in rows.flatten()]
    assert torch.equal(at_once.flatten(0, -2), torch.stack(by_row))


def test_keep_mask_depends_on_global_places_only() -> None:
    seed = torch.tensor([5, 6])
    whole = attention_keep_mask(seed, torch.arange(9), 23, 0.3, num_heads=4)
    heads = attention_keep_mask(seed, torch.arange(9), 23, 0.3, num_heads=2, head_offset=2)
    at = torch.tensor([[8, 2], [0, -1]])
    gathered = attention_keep_mask(seed, at, 23, 0.3, num_heads=4)
    assert torch.equal(heads, whole[:, 2:])
    assert torch.equal(gathered[0], whole[0][:, [8, 2]])
    assert torch.equal(gathered[1, :, 0], whole[1][:, 0])
    assert torch.equal(
        keep_mask(seed[1:], at[:1], 16, 0.3), keep_mask(seed, at[0], 23, 0.3)[1:, ..., :16]
    )


def test_dropped_are_the_bytes_below_the_threshold() -> None:
    keep = keep_mask(torch.tensor([5]), torch.arange(9), 23, 0.1)
    assert torch.equal(keep, byte_block([5], 1, 9, 23) >= 26)
    keep = attention_keep_mask(torch.tensor([5]), torch.arange(9), 23, 0.1)
    assert torch.equal(keep, attention_block([5], 1, 9, 23) >= 26)
    assert keep_scale(0.1) == 256 / 230
    assert keep_scale(0.0) == 1.0
    assert keep_mask(torch.tensor([5]), torch.arange(9), 23, 0.0).all()


@pytest.mark.parametrize("p", [-0.1, 1.0, 0.999, math.nan])
def test_impossible_probabilities_are_refused(p: float) -> None:
    for mask in (keep_mask, attention_keep_mask):
        with pytest.raises(ValueError, match="dropout_p: got"):
            mask(torch.tensor([5]), torch.arange(2), 3, p)


def by_word(block: Tensor) -> Tensor:
    """Return the bytes of attention by place in their word, ``[4, words]``."""
    words = block.unflatten(-1, (-1, 2, 8)).unflatten(-4, (-1, 2, 8))
    return words.movedim((-5, -2), (0, 1)).flatten(0, 1).flatten(1)


def test_bytes_are_uniform_in_every_byte_of_the_word() -> None:
    block = byte_block([11, 12, 13, 14], 4, 128, 512).long()  # 2**20 bytes
    attention = by_word(attention_block([11, 12, 13, 14], 4, 128, 512)).long()
    for values in (*(block[..., byte::4] for byte in range(4)), *attention):
        counts = torch.bincount(values.flatten(), minlength=256).double()
        expected = counts.sum() / 256
        chi_squared = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)


def test_elements_of_a_word_are_uncorrelated() -> None:
    """The elements of attention that share a word: any two, three and all four together."""
    values = by_word(attention_block(list(range(16)), 4, 256, 256))  # 2**20 words
    rate = 26 / 256
    drop = ((values < 26).double() - rate) / math.sqrt(rate * (1 - rate))
    uniform = (values.double() - 127.5) / math.sqrt((256**2 - 1) / 12)
    for kind, x in (("drop", drop), ("byte", uniform)):
        for count in (2, 3, 4):
            for places in itertools.combinations(range(4), count):
                product = x[list(places)].prod(0)
                # Of standardised independent variables: mean 0, variance 1.
                deviation = float(product.sum()) / math.sqrt(product.numel())
                assert abs(deviation) < 5, f"{kind}, bytes {places}: {deviation:.1f} sigma"


@pytest.mark.parametrize("bytes_of", [byte_block, attention_block])
@pytest.mark.parametrize("seeds", [list(range(8)), [1 << 32 + n for n in range(8)]])
def test_neighbours_are_uncorrelated(
    seeds: list[int], bytes_of: Callable[[list[int], int, int, int], Tensor]
) -> None:
    drop = (bytes_of(seeds, 8, 64, 64) < 26).double() - 26 / 256
    variance = 26 / 256 * 230 / 256
    for dim in range(4):
        for step in (1, 2, 4, 8, 16)[: 3 if dim < 2 else 5]:
            length = drop.shape[dim] - step
            product = drop.narrow(dim, 0, length) * drop.narrow(dim, step, length)
            deviation = float(product.sum()) / variance / math.sqrt(product.numel())
            assert abs(deviation) < 5, f"dimension {dim}, step {step}: {deviation:.1f} sigma"


@pytest.mark.parametrize("bytes_of", [byte_block, attention_block])
def test_the_rate_is_right_in_every_row_and_column(
    bytes_of: Callable[[list[int], int, int, int], Tensor],
) -> None:
    drop = (bytes_of(list(range(16)), 4, 128, 256) < 26).double()
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


@pytest.mark.parametrize("num_features", [16, 7, 1])
def test_compiled_bytes_are_the_same(num_features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([[1, -5], [2**31 - 1, -(2**31)]], dtype=torch.int32)
    expected = random_bytes(rows, num_features)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = random_bytes(rows, num_features)
    assert torch.equal(found, expected.to(found.dtype))

"""Checksums see every flipped bit, and the rank that differs from the others is found."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megatron_deberta.train.stability import replicas
from megatron_deberta.train.stability.replicas import Replica, checksum, find_differing_ranks

ANY = torch.zeros(1)


def flip(tensor: Tensor, element: int, bit: int) -> None:
    bits = tensor.view(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    sign = 8 * tensor.element_size() - 1
    bits[element] ^= -(1 << sign) if bit == sign else 1 << bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_single_bit_counts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_CHUNK_ELEMENTS", 8)
    tensor = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = {int(checksum(tensor))}
    for element in range(tensor.numel()):
        for bit in range(8 * tensor.element_size()):
            flip(tensor, element, bit)
            sums.add(int(checksum(tensor)))
            flip(tensor, element, bit)
    assert len(sums) == 1 + tensor.numel() * 8 * tensor.element_size()


def test_order_and_signs_of_zeros_count() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    sums = {int(checksum(rows)), int(checksum(rows.t())), int(checksum(rows.flip(0)))}
    rows[1, 1] = -0.0
    assert len(sums | {int(checksum(rows))}) == 4


def of(name: str, over_dp: bool, over_tp: bool) -> Replica:
    return Replica(name, ANY, over_dp, over_tp)


EVERYWHERE, SPLIT, ZERO3 = of("norm", True, True), of("up", True, False), of("bias", False, True)


def agreed(dp_size: int, tp_size: int) -> list[list[int]]:
    """Rows of ranks that all agree; split ones differ by column, ZeRO-3's by row."""
    return [[7, 100 + rank % tp_size, 200 + rank // tp_size] for rank in range(dp_size * tp_size)]


def test_one_of_three_or_more_is_found() -> None:
    drawn = random.Random(0)
    found = [EVERYWHERE, SPLIT, ZERO3]
    for dp_size, tp_size in ((4, 1), (3, 2), (4, 4), (1, 4)):
        sums = agreed(dp_size, tp_size)
        assert find_differing_ranks(sums, found, tp_size) == {}
        rank = drawn.randrange(len(sums))
        sums[rank][0] += 1
        assert find_differing_ranks(sums, found, tp_size) == {"norm": (rank,)}


def test_without_a_majority_all_holders_are_named() -> None:
    sums = agreed(2, 2)
    sums[3][1] += 1
    sums[0][2] += 1
    assert find_differing_ranks(sums, [EVERYWHERE, SPLIT, ZERO3], 2) == {
        "up": (1, 3),
        "bias": (0, 1),
    }
    sums = agreed(2, 2)
    sums[1][0] = sums[3][0] = 9
    assert find_differing_ranks(sums, [EVERYWHERE, SPLIT, ZERO3], 2) == {"norm": (0, 1, 2, 3)}

"""Slots against transformers' functions and against the paper's definition."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from megatron_deberta.ops import RelativePositions


def transformers_slots(length: int, positions: RelativePositions) -> torch.Tensor:
    rows = torch.empty(1, length, 1)
    buckets = positions.buckets or -1
    relative = build_relative_position(rows, rows, buckets, positions.max_distance)[0]
    return torch.clamp(relative + positions.span, 0, 2 * positions.span - 1)


@pytest.mark.parametrize("length", [1, 2, 7, 127, 130, 700])
@pytest.mark.parametrize(
    ("max_distance", "buckets"),
    [(512, 256), (512, 0), (4, 0), (1, 0), (128, 32), (64, 64), (8, 2), (16, 4), (24576, 512)],
)
def test_slots_equal_those_of_transformers(max_distance: int, buckets: int, length: int) -> None:
    positions = RelativePositions(max_distance, buckets)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    assert torch.equal(positions.slots(distance), transformers_slots(length, positions))


def test_slots_equal_those_of_transformers_over_one_long_row_of_distances() -> None:
    positions = RelativePositions(512, 256)
    from_transformers = transformers_slots(2500, positions)
    assert torch.equal(positions.slots(torch.arange(2500)), from_transformers[:, 0])
    assert torch.equal(positions.slots(-torch.arange(2500)), from_transformers[0])


def test_linear_distances_are_the_papers_delta() -> None:
    k = 5  # Eq. 3: 0 for i-j <= -k, 2k-1 for i-j >= k, else i-j+k
    expected = {-9: 0, -5: 0, -4: 1, -1: 4, 0: 5, 1: 6, 4: 9, 5: 9, 100: 9}
    slots = RelativePositions(k, 0).slots(torch.tensor(list(expected), dtype=torch.int32))
    assert slots.tolist() == list(expected.values())
    assert slots.dtype == torch.int64


def test_distances_beyond_reach_saturate() -> None:
    positions = RelativePositions(512, 256)
    far = torch.tensor([-(10**9), -513, 512, 10**9])
    assert positions.slots(far).tolist() == [0, 0, 511, 511]


def test_the_table_is_usable_in_training_when_inference_came_first() -> None:
    positions = RelativePositions(max_distance=97, buckets=0)
    with torch.inference_mode():
        positions.slots(torch.arange(3))
    table = torch.randn(2 * positions.span, requires_grad=True)
    table[positions.slots(torch.arange(3))].sum().backward()
    assert table.grad is not None


def test_a_meta_default_device_does_not_reach_the_table() -> None:
    positions = RelativePositions(max_distance=89, buckets=16)
    with torch.device("meta"):
        slots = positions.slots(torch.arange(4, device="cpu"))
    assert slots.device.type == "cpu"


@pytest.mark.parametrize(
    ("sizes", "name"),
    [((0, 0), "max_distance"), ((512, -1), "buckets"), ((512, 7), "buckets"), ((16, 32), "max_")],
)
def test_sizes_without_a_map_are_refused(sizes: tuple[int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*got.*expected"):
        RelativePositions(*sizes)

"""The position tables in the form the fused kernels read: one row a distance, no buckets.

Row t of the linear table stands for distance t - near * tile; of the keys' table for the negated
distance. Beyond ``saturation`` all distances share a slot, so tiles that lie beyond need no table.
Everything here is an integer made on the CPU from the same slot table as every backend's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_deberta.ops.relative_positions import RelativePositions


@dataclass(frozen=True, slots=True)
class LinearTable:
    """How a table of slots becomes one of distances, and its gradient becomes one of slots."""

    slots: Tensor
    """int64 ``[2 * near * tile]``, the slot each row is a copy of."""
    rows: Tensor
    """int32 ``[2 * span, 2]``, first and one past the last row of each slot."""


@lru_cache(maxsize=64)
def saturation(positions: RelativePositions) -> int:
    """The least distance from which on, either way, every distance has the slot of the farthest.

    Args:
        positions: which slot stands for which distance.
    """
    distance = torch.arange(-positions.reach, positions.reach + 1, device="cpu")
    slots = positions.slots(distance)
    inside = (slots != slots[0]) & (slots != slots[-1])
    return int(distance[inside].abs().max()) + 1 if bool(inside.any()) else 1


def near_tiles(positions: RelativePositions, length: int, tile: int) -> int:
    """How many tiles apart two tiles must be at least to need no table.

    Args:
        positions: which slot stands for which distance.
        length: of a row.
        tile: positions of a tile.

    Returns:
        At least 1, at most the tiles of a row.
    """
    beyond = -(-(saturation(positions) + tile - 1) // tile)
    return max(1, min(beyond, -(-length // tile)))


@lru_cache(maxsize=256)
def linear_table(
    positions: RelativePositions, near: int, tile: int, sign: int, device: torch.device
) -> LinearTable:
    """The form of one table.

    Args:
        positions: which slot stands for which distance.
        near: ``near_tiles``.
        tile: positions of a tile.
        sign: 1 where rows rise with the distance whose slot they take, -1 where they fall.
        device: where it is to live.
    """
    with torch.inference_mode(False):
        reach = near * tile
        distance = torch.arange(-reach, reach, device="cpu")
        slots = positions.slots(sign * distance)
        lengths = torch.bincount(slots, minlength=2 * positions.span)
        # Slots rise or fall along the rows, so each has one run of them.
        ends = lengths.cumsum(0) if sign > 0 else lengths.flip(0).cumsum(0).flip(0)
        rows = torch.stack([ends - lengths, ends], dim=1).int()
        return LinearTable(slots.to(device), rows.to(device))

"""The position tables in linear form, as the fused kernels read them: one row per distance.

Row t of the linear table stands for distance t - near * tile (negated in the keys' table). From
``saturation`` on all distances share a slot, so tiles that lie beyond need no table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_deberta.ops.relative_positions import RelativePositions


@dataclass(frozen=True, slots=True)
class LinearTable:
    """Mapping between the slots of a position table and the rows of its linear form."""

    slots: Tensor
    """int64 ``[2 * near * tile]``, the slot of each row."""
    rows: Tensor
    """int32 ``[2 * span, 2]``, first and one past the last row of each slot."""


@lru_cache(maxsize=64)
def saturation(positions: RelativePositions) -> int:
    """Return the least distance from which on all distances of a sign share a slot."""
    distance = torch.arange(-positions.reach, positions.reach + 1, device="cpu")
    slots = positions.slots(distance)
    inside = (slots != slots[0]) & (slots != slots[-1])
    return int(distance[inside].abs().max()) + 1 if bool(inside.any()) else 1


def near_tiles(positions: RelativePositions, length: int, tile: int) -> int:
    """Return the number of tiles from which on two tiles are too far apart to need the tables.

    At least 1 and at most the tiles of a row.

    Args:
        positions: map from distances to slots.
        length: positions in a row.
        tile: positions per tile.
    """
    beyond = -(-(saturation(positions) + tile - 1) // tile)
    return max(1, min(beyond, -(-length // tile)))


@lru_cache(maxsize=256)
def linear_table(
    positions: RelativePositions, near: int, tile: int, sign: int, device: torch.device
) -> LinearTable:
    """Build the linear form of one table.

    Args:
        positions: map from distances to slots.
        near: ``near_tiles``.
        tile: positions per tile.
        sign: 1 if row t stands for the distance itself, -1 if for its negation.
        device: device of the result.
    """
    with torch.inference_mode(False):
        reach = near * tile
        distance = torch.arange(-reach, reach, device="cpu")
        slots = positions.slots(sign * distance)
        lengths = torch.bincount(slots, minlength=2 * positions.span)
        # Slots are monotonic along the rows, so each occupies one run of them.
        ends = lengths.cumsum(0) if sign > 0 else lengths.flip(0).cumsum(0).flip(0)
        rows = torch.stack([ends - lengths, ends], dim=1).int()
        return LinearTable(slots.to(device), rows.to(device))

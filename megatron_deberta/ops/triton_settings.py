"""Tile sizes, warps and pipeline stages of the fused kernels; the place to tune them.

The kernels are correct with any of these. All kernels of a call share one tile size, because the
band of score gradients and the tables are cut into tiles. Where a score tile comes out of a matrix
product, its rows must each lie within a warp, or maxima and rotations cross warps: 16 rows a warp,
so 4 warps for tiles of 64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Setting(NamedTuple):
    """How a kernel is launched."""

    warps: int
    stages: int


TILES = {torch.float16: 64, torch.bfloat16: 64, torch.float32: 32}
"""Queries, and keys, of a tile."""

DEFAULT = Setting(warps=4, stages=2)
_SIZES = (32, 64, 128)
LAUNCH: dict[tuple[str, int], Setting] = {
    **{("fold", size): Setting(1, 1) for size in _SIZES},
    # With a second stage a multiprocessor's shared memory would hold one program instead of two.
    **{("key", size): Setting(4, 1) for size in _SIZES},
    **{("table_gradient", size): Setting(8, 2) for size in _SIZES},
    # Gathered queries are few, and their tiles take many registers.
    **{("gathered_forward", size): Setting(8, 1) for size in _SIZES},
    **{("gathered_query", size): Setting(8, 1) for size in _SIZES},
    **{("gathered_key", size): Setting(8, 1) for size in _SIZES},
}
"""By kernel and head size; ``DEFAULT`` where nothing is said."""


def tile_size(dtype: torch.dtype, head_size: int) -> int:
    """Queries, and keys, of a tile.

    Args:
        dtype: of the inputs.
        head_size: features of a head.
    """
    return TILES[dtype]


def warps_and_stages(kernel: str, dtype: torch.dtype, head_size: int) -> Setting:
    """How a kernel is launched.

    Args:
        kernel: its name without ``_kernel``.
        dtype: of the inputs.
        head_size: features of a head.
    """
    return LAUNCH.get((kernel, head_size), DEFAULT)

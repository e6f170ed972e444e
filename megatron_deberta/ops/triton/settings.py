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


TILES = {torch.float16: 64, torch.bfloat16: 64, torch.float32: 16}
"""Queries, and keys, of a tile. float32 has no tensor cores, so operands of products are in
registers: tiles of 32 take a seventh fewer instructions an element, but spill."""

MOST_POSITIONS = 1 << 24
"""A row must be shorter: ``tiles.hidden_zero``."""

SMALL_TILE = 32
"""At most so many where operands and results of a product are in registers all at once, that is
without asynchronous matrix products, and for gathered queries, whose tiles hold more. Larger tiles
spill there, and took as many instructions an element or more."""

_ASYNCHRONOUS = (9, 10)
"""Major compute capabilities with matrix products that read shared memory: Hopper, Blackwell."""

LAUNCH: dict[tuple[str, int], Setting] = {
    ("fold", 64): Setting(1, 1),
    ("fold", 32): Setting(1, 1),
    ("fold", 16): Setting(1, 1),
    # With a second stage a multiprocessor's shared memory would hold one program instead of two.
    ("key", 64): Setting(4, 1),
    ("key", 32): Setting(2, 1),
    ("key", 16): Setting(1, 1),
    ("table_gradient", 64): Setting(8, 2),
    # Gathered queries are few, and their tiles take many registers.
    ("gathered_forward", 32): Setting(4, 1),
    ("gathered_query", 32): Setting(8, 1),
    ("gathered_key", 32): Setting(4, 1),
    ("gathered_key", 16): Setting(1, 1),
}
"""By kernel and tile size; elsewhere two stages, and a warp for 16 rows of a tile."""

WIDE_HEAD = 128
"""From this size of heads on ``key_kernel`` and ``far_key_kernel`` run in two parts, because
registers do not hold all they add up: near tiles hand their probabilities on in the band, far ones
are computed twice."""

WIDE = {("forward", 32): Setting(4, 2), ("gathered_key", 32): Setting(8, 1)}
"""Instead, for such heads: too many values for fewer warps."""

BLACKWELL = {("forward", 64): Setting(4, 1)}
"""Instead, with tensor memory: there two stages of the forward kernel make twice the
instructions, spill, and take three times the shared memory."""


def tile_size(dtype: torch.dtype, gathered: bool, capability: tuple[int, int] | None) -> int:
    """Queries, and keys, of a tile.

    Args:
        dtype: of the inputs.
        gathered: whether queries are gathered.
        capability: of the GPU, None in Triton's interpreter.
    """
    small = gathered or (capability is not None and capability[0] not in _ASYNCHRONOUS)
    return min(TILES[dtype], SMALL_TILE) if small else TILES[dtype]


def warps_and_stages(
    kernel: str, dtype: torch.dtype, tile: int, head_size: int, capability: tuple[int, int] | None
) -> Setting:
    """How a kernel is launched.

    Args:
        kernel: its name without ``_kernel``.
        dtype: of the inputs.
        tile: ``tile_size``.
        head_size: features of a head.
        capability: of the GPU, None in Triton's interpreter.
    """
    setting = LAUNCH.get((kernel, tile), Setting(max(tile // 16, 1), 2))
    if head_size >= WIDE_HEAD:
        setting = WIDE.get((kernel, tile), setting)
    if capability is not None and capability[0] == 10:
        setting = BLACKWELL.get((kernel, tile), setting)
    if dtype == torch.float32 and kernel != "fold":
        setting = Setting(8, setting.stages)
    return setting

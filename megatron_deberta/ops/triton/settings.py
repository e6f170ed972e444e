"""Tile sizes, warps and pipeline stages of the fused kernels.

Results are correct with any of these. All kernels of a call share one tile size, because the band
of score gradients and the tables are cut into tiles. Each row of a score tile that comes out of a
matrix product must lie within one warp, or maxima and rotations cross warps: 16 rows per warp, so
4 warps for tiles of 64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class LaunchSetting(NamedTuple):
    """Launch settings of one kernel.

    Attributes:
        registers: maximum number of registers per thread; values that do not fit are spilled.
            None: no limit.
    """

    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Return the settings under Triton's names."""
        found = {"num_warps": self.warps, "num_stages": self.stages}
        return found if self.registers is None else found | {"maxnreg": self.registers}


TILES = {torch.float16: 64, torch.bfloat16: 64, torch.float32: 16}
"""Queries, and keys, per tile. float32 has no tensor cores, so operands of products are in
registers: tiles of 32 take a seventh fewer instructions per element, but spill."""

MAX_POSITIONS = 1 << 24
"""A row must be shorter: ``tiles.opaque_zero``."""

SMALL_TILE = 32
"""Largest tile where operands and results of a product are all in registers, that is without
asynchronous matrix products, and for gathered queries, whose tiles need more registers. Larger
tiles spill there, and took as many instructions per element or more."""

SPREAD_FRACTION = 1 / 16
"""From this share of a row's positions on, queries at distinct positions are spread over the whole
row for the kernels of consecutive queries. Those of gathered queries take more instructions: each
pair of a key tile and a block of the tables is multiplied, however few queries there are."""

_ASYNCHRONOUS = (9, 10)
"""Major compute capabilities with matrix products that read shared memory: Hopper, Blackwell."""

LAUNCH: dict[tuple[str, int], LaunchSetting] = {
    ("fold", 64): LaunchSetting(1, 1),
    ("fold", 32): LaunchSetting(1, 1),
    ("fold", 16): LaunchSetting(1, 1),
    # With a second stage a multiprocessor's shared memory would hold one program instead of two.
    ("key", 64): LaunchSetting(4, 1),
    ("key", 32): LaunchSetting(2, 1),
    ("key", 16): LaunchSetting(1, 1),
    ("table_gradient", 64): LaunchSetting(4, 2),
    # Gathered queries are few, and their tiles take many registers.
    ("gathered_forward", 32): LaunchSetting(4, 1),
    ("gathered_query", 32): LaunchSetting(8, 1),
    ("gathered_key", 32): LaunchSetting(8, 1),
    ("gathered_key", 16): LaunchSetting(1, 1),
}
"""By kernel and tile size. Default: two stages, and a warp per 16 rows of a tile."""

WIDE_HEAD = 128
"""From this head size on ``key_kernel`` and ``far_key_kernel`` run in two parts, because registers
do not hold all their sums: near tiles pass their probabilities on in the band, far ones are
computed twice."""

WIDE = {("forward", 32): LaunchSetting(4, 2)}
"""Overrides for such heads, which need the registers of more warps."""

BLACKWELL = {("forward", 64): LaunchSetting(4, 1)}
"""Overrides for GPUs with tensor memory: two stages of the forward kernel take twice the
instructions there, spill, and need three times the shared memory."""


def tile_size(dtype: torch.dtype, gathered: bool, capability: tuple[int, int] | None) -> int:
    """Return the queries, and keys, per tile.

    Args:
        dtype: of the inputs.
        gathered: whether queries are gathered.
        capability: compute capability of the GPU; None in Triton's interpreter.
    """
    small = gathered or (capability is not None and capability[0] not in _ASYNCHRONOUS)
    return min(TILES[dtype], SMALL_TILE) if small else TILES[dtype]


def launch_setting(
    kernel: str, dtype: torch.dtype, tile: int, head_dim: int, capability: tuple[int, int] | None
) -> LaunchSetting:
    """Return the launch settings of a kernel.

    Args:
        kernel: its name without ``_kernel``.
        dtype: of the inputs.
        tile: ``tile_size``.
        head_dim: features per head.
        capability: compute capability of the GPU; None in Triton's interpreter.
    """
    setting = LAUNCH.get((kernel, tile), LaunchSetting(max(tile // 16, 1), 2))
    if head_dim >= WIDE_HEAD:
        setting = WIDE.get((kernel, tile), setting)
    if capability is not None and capability[0] == 10:
        setting = BLACKWELL.get((kernel, tile), setting)
    if dtype == torch.float32 and kernel != "fold":
        setting = setting._replace(warps=8)
    return setting

"""Launches the fused kernels: tiles, grids and buffers of one forward or backward pass.

Reads nothing from the device, so the host never waits; nothing here depends on a tensor's values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_deberta.ops.dropout_bits import drop_threshold, keep_scale
from megatron_deberta.ops.relative_positions import RelativePositions
from megatron_deberta.ops.triton import backward as backward_kernels
from megatron_deberta.ops.triton import far as far_kernels
from megatron_deberta.ops.triton import forward as forward_kernels
from megatron_deberta.ops.triton import table_gradients as table_kernels
from megatron_deberta.ops.triton.settings import (
    MOST_POSITIONS,
    WIDE_HEAD,
    tile_size,
    warps_and_stages,
)
from megatron_deberta.ops.triton.tables import LinearTable, linear_table, near_tiles

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Ranges:
    """What is visible, as ranges that never fall along a row; int32 ``[batch, length]`` each."""

    low: Tensor
    """First key a query sees."""
    high: Tensor
    """One past the last."""
    seen_low: Tensor
    """First query that sees a key."""
    seen_high: Tensor
    """One past the last."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the operator, as the kernels need it."""

    q: Tensor
    k: Tensor
    v: Tensor
    pos_key: Tensor | None
    pos_query: Tensor | None
    ranges: Ranges | None
    seed: Tensor | None
    positions: RelativePositions
    p2c_sign: int
    """1 where the position-to-content term takes delta(i - j), -1 for delta(j - i)."""
    dropout_p: float
    head_offset: int
    scale: float


class Plan:
    """Tiles, tables and flags that the passes of a call share."""

    def __init__(self, call: Call, gathered: bool = False) -> None:
        """Lays the tables out by distance.

        Args:
            call: with tensors whose last dimension is contiguous.
            gathered: whether queries are gathered, or what follows is about such queries.
        """
        q = call.q
        self.call = call
        self.batch, self.heads, self.count, self.size = call.k.shape
        if self.count >= MOST_POSITIONS:
            raise ValueError(f"k: got {self.count} positions, expected below {MOST_POSITIONS}")
        self.capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
        self.tile = tile_size(q.dtype, gathered, self.capability)
        self.tiles = -(-self.count // self.tile)
        self.near = near_tiles(call.positions, self.count, self.tile)
        self.far = self.tiles > self.near
        self.width = min(self.tiles, 2 * self.near - 1)
        self.key_form = self.query_form = None
        # A kernel's argument must be a tensor even where it is never read.
        self.key_table = self.query_table = q
        if call.pos_key is not None:
            self.key_form = self._form(1)
            self.key_table = call.pos_key.index_select(1, self.key_form.slots)
        if call.pos_query is not None:
            self.query_form = self._form(-call.p2c_sign)
            self.query_table = call.pos_query.index_select(1, self.query_form.slots)
        self.half = q.dtype != torch.float32
        # The largest power of two within the scale: what is multiplied by it rounds no differently,
        # but for entries of float16 tables below 2**-14 / this, whose terms no score shows.
        exponent = min(math.frexp(call.scale)[1] - 1, 0) if self.half else 0
        self.pack_scale = 2.0**exponent
        self.even = self.count % self.tile == 0

    def _form(self, sign: int) -> LinearTable:
        positions, device = self.call.positions, self.call.q.device
        return linear_table(positions, self.near, self.tile, sign, device)

    @property
    def grid(self) -> tuple[int]:
        """One program a tile of queries or keys of each head and row."""
        return (self.tiles * self.batch * self.heads,)

    def flags(self, kernel: str, *names: str) -> dict[str, Any]:
        """Compile-time arguments and launch settings of a kernel.

        Args:
            kernel: its name in the settings.
            *names: which of the flags it takes.
        """
        setting = warps_and_stages(kernel, self.call.q.dtype, self.tile, self.size, self.capability)
        every = {
            "C2P": self.key_form is not None,
            "P2C": self.query_form is not None,
            "HALF": self.half,
            "FAR": self.far,
            "RANGES": self.call.ranges is not None,
            "EVEN": self.even,
            "DROP": self.call.seed is not None,
        }
        chosen = {name: every[name] for name in names}
        launch = {"num_warps": setting.warps, "num_stages": setting.stages}
        return {"B": self.tile, "D": self.size, **chosen, **launch}

    def packed_tables(self) -> tuple[Tensor, Tensor]:
        """The tables for products that are packed into 16 bits, where unscaled ones may not fit.

        A term takes part in a score after its scale, so that is what must fit float16.
        """
        tables = []
        for table, form in (
            (self.key_table, self.key_form),
            (self.query_table, self.query_form),
        ):
            packed = form is not None and self.pack_scale != 1.0
            tables.append(table * self.pack_scale if packed else table)
        return tables[0], tables[1]

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A buffer on the call's device."""
        return torch.empty(shape, dtype=dtype, device=self.call.q.device)

    def end_products(self) -> tuple[Tensor, Tensor]:
        """Products of queries and keys with the ends of the tables, where far tiles need them."""
        outputs = []
        for x, table, form in (
            (self.call.q, self.key_table, self.key_form),
            (self.call.k, self.query_table, self.query_form),
        ):
            out = x
            if self.far and form is not None:
                out = self.empty(self.batch, self.heads, 2, self.count)
                far_kernels.end_products_kernel[self.grid](
                    x, table, out, *x.stride()[:3], self.heads, self.count,
                    2 * self.near * self.tile - 1, **self.flags("products"),
                )  # fmt: skip
            outputs.append(out)
        return outputs[0], outputs[1]

    def visibility(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The ranges, or tensors that nothing reads."""
        ranges, q = self.call.ranges, self.call.q
        if ranges is None:
            return q, q, q, q
        return ranges.low, ranges.high, ranges.seen_low, ranges.seen_high

    @property
    def seed(self) -> Tensor:
        """The seeds, or a tensor that nothing reads."""
        return self.call.q if self.call.seed is None else self.call.seed

    @property
    def dropout(self) -> tuple[int, float, int]:
        """Threshold, scale and head offset."""
        p = self.call.dropout_p if self.call.seed is not None else 0.0
        return drop_threshold(p), keep_scale(p), self.call.head_offset


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """The forward pass.

    Args:
        call: with tensors whose last dimension is contiguous.

    Returns:
        Output like ``q``, and the log2-sum-exp2 of the scores, float32 ``[batch, heads, length]``.
    """
    plan = Plan(call)
    q, k, v = call.q, call.k, call.v
    output = torch.empty_like(q)
    lse2 = plan.empty(plan.batch, plan.heads, plan.count)
    low, high, _, _ = plan.visibility()
    flags = plan.flags("forward", "C2P", "P2C", "HALF", "FAR", "RANGES", "EVEN", "DROP")
    forward_kernels.forward_kernel[plan.grid](
        q, k, v, *plan.packed_tables(), *plan.end_products(), low, high, plan.seed,
        output, lse2, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *output.stride()[:3],
        plan.heads, plan.count, plan.near, call.scale * LOG2_E, *plan.dropout,
        1 / plan.pack_scale, **flags,
    )  # fmt: skip
    return output, lse2


def backward(
    call: Call, output: Tensor, lse2: Tensor, d_output: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The backward pass.

    Args:
        call: as in the forward pass.
        output: of the forward pass.
        lse2: of the forward pass.
        d_output: gradient of the output; its last dimension is contiguous.

    Returns:
        Gradients of q, k, v, pos_key and pos_query.
    """
    plan = Plan(call)
    q, k, v = call.q, call.k, call.v
    batch, heads, count, size = q.shape
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = plan.empty(batch, heads, count)
    backward_kernels.output_products_kernel[plan.grid](
        output, d_output, delta, *output.stride()[:3], *d_output.stride()[:3], heads, count,
        **plan.flags("products"),
    )  # fmt: skip
    tile = plan.tile
    band = plan.empty(batch, heads, plan.tiles, plan.width, tile, tile, dtype=q.dtype)
    d_k_far, d_v_far = (plan.empty(*k.shape) if plan.far else q for _ in range(2))
    sums_shape = (batch, heads, 2, count) if plan.far else (0,)
    q_sums, k_sums = plan.empty(*sums_shape), plan.empty(*sums_shape)
    low, high, seen_low, seen_high = plan.visibility()
    q_ends, k_ends = plan.end_products()
    inputs = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_output.stride()[:3]]
    shape = (heads, count, plan.near, plan.width)
    masks = ("FAR", "RANGES", "EVEN")
    wide = size >= WIDE_HEAD

    if plan.far:
        for values, keys in ((True, False), (False, True)) if wide else ((True, True),):
            far_kernels.far_key_kernel[plan.grid](
                q, k, v, d_output, plan.query_table, q_ends, k_ends, seen_low, seen_high,
                plan.seed, lse2, delta, d_v_far, d_k_far, k_sums, *inputs, *shape[:3],
                call.scale * LOG2_E, *plan.dropout, VALUES=values, KEYS=keys,
                **plan.flags("far_key", "C2P", "P2C", "RANGES", "EVEN", "DROP"),
            )  # fmt: skip
    for scores, values in ((True, False), (False, True)) if wide else ((True, True),):
        backward_kernels.key_kernel[plan.grid](
            q, k, v, d_output, *plan.packed_tables(), seen_low, seen_high, plan.seed, lse2,
            delta, d_v, band, d_v_far, *inputs, *d_v.stride()[:3], *shape, call.scale * LOG2_E,
            *plan.dropout, 1 / plan.pack_scale, SCORES=scores, VALUES=values,
            **plan.flags("key", "C2P", "P2C", "HALF", *masks, "DROP"),
        )  # fmt: skip
    backward_kernels.key_gradient_kernel[plan.grid](
        q, plan.query_table, seen_low, seen_high, band, d_k_far, d_k, *q.stride()[:3],
        *d_k.stride()[:3], *shape, call.scale, CONTENT=True,
        **plan.flags("key_gradient", "P2C", *masks),
    )  # fmt: skip
    backward_kernels.query_gradient_kernel[plan.grid](
        q, k, v, d_output, plan.key_table, q_ends, k_ends, low, high, plan.seed, lse2, delta, band,
        d_q, q_sums, *inputs, *d_q.stride()[:3], *shape, call.scale, call.scale * LOG2_E,
        *plan.dropout, **plan.flags("query_gradient", "C2P", "P2C", *masks, "DROP"),
    )  # fmt: skip
    return d_q, d_k, d_v, *table_gradients(plan, band, q_sums, k_sums)


_PROGRAMS = 512
"""Programs to aim at where the batch is shared out: a few for each multiprocessor of a large GPU.
Fixed, not asked of the device, so that sums have the same order everywhere."""


def table_gradients(
    plan: Plan, band: Tensor, q_sums: Tensor, k_sums: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of pos_key and pos_query.

    Args:
        plan: of the call.
        band: gradients of the scores of near tiles.
        q_sums: of ``query_gradient_kernel``; read only where there are far tiles.
        k_sums: of ``key_kernel``; likewise.
    """
    call = plan.call
    if plan.key_form is None and plan.query_form is None:
        return None, None
    chunk = min(plan.size, 64)
    per_split = plan.heads * plan.size // chunk * (2 * plan.near)
    splits = min(plan.batch, -(-_PROGRAMS // per_split))
    shape = (splits, 2, plan.heads, 2 * plan.near, plan.tile, plan.size)
    key_parts = plan.empty(*shape) if plan.key_form is not None else band
    query_parts = plan.empty(*shape) if plan.query_form is not None else band
    low, high, _, _ = plan.visibility()
    grid = (2 * plan.near, plan.heads * plan.size // chunk, splits)
    table_kernels.table_gradient_kernel[grid](
        call.q, call.k, band, low, high, key_parts, query_parts, *call.q.stride()[:3],
        *call.k.stride()[:3], plan.batch, plan.heads, plan.count, plan.near, plan.width, splits,
        CHUNK=chunk, **plan.flags("table_gradient", "C2P", "P2C", "RANGES", "EVEN"),
    )  # fmt: skip
    gradients = []
    for table, form, parts, x, sums, negated in (
        (call.pos_key, plan.key_form, key_parts, call.q, q_sums, False),
        (call.pos_query, plan.query_form, query_parts, call.k, k_sums, True),
    ):
        gradient = None
        if table is not None and form is not None:
            gradient = _fold(plan, table, form, parts, x, sums, splits, negated)
        gradients.append(gradient)
    return gradients[0], gradients[1]


def _fold(
    plan: Plan,
    table: Tensor,
    form: LinearTable,
    parts: Tensor,
    x: Tensor,
    sums: Tensor,
    splits: int,
    negated: bool,
) -> Tensor:
    """Gradient of one table by slot."""
    shares = min(plan.batch * plan.tiles, -(-_PROGRAMS // plan.heads))
    ends = parts
    if plan.far:
        ends = plan.empty(plan.heads, 2, shares, plan.size)
        far_kernels.end_gradient_kernel[(plan.heads, shares)](
            x, sums, ends, *x.stride()[:3], plan.batch, plan.heads, plan.count, shares,
            **plan.flags("products"),
        )  # fmt: skip
    gradient = torch.empty(table.shape, dtype=table.dtype, device=table.device)
    table_kernels.fold_kernel[(table.shape[1], plan.heads)](
        parts, ends, form.rows, gradient, plan.heads, plan.near, splits, shares, plan.call.scale,
        NEGATED=negated, CHUNK=16, **plan.flags("fold", "FAR"),
    )  # fmt: skip
    return gradient

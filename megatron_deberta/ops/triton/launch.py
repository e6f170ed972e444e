"""Launch of the fused kernels: tiles, grids and buffers of one forward or backward pass.

Nothing is read from the device, so the host never synchronises.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_deberta.ops.dropout_bits import drop_threshold, keep_scale
from megatron_deberta.ops.relative_positions import RelativePositions
from megatron_deberta.ops.triton import consecutive, tables
from megatron_deberta.ops.triton.settings import (
    MAX_POSITIONS,
    WIDE_HEAD,
    launch_setting,
    tile_size,
)
from megatron_deberta.ops.triton.tiles import DropoutArguments, head_tensor

LOG2_E = 1.4426950408889634

Gradients = tuple[Tensor | None, ...]
"""Gradients of q, k, v, pos_key and pos_query; of q, k and v that stand together, one buffer."""


class KernelCall(NamedTuple):
    """Arguments of the custom operators; the last dimension of q, k and v is contiguous.

    Attributes:
        ranges: which keys queries see and which queries see keys; of gathered queries,
            ``placement``.
        paper: the position-to-content term takes delta(j - i) instead of delta(i - j).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pos_key: Tensor | None
    pos_query: Tensor | None
    ranges: Tensor | None
    seed: Tensor | None
    gathered: bool
    max_distance: int
    buckets: int
    paper: bool
    dropout_p: float
    head_offset: int
    scale: float


def stands_together(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether q, k and v are views of one tensor ``[batch, length, 3, heads, head_dim]``.

    Its rows may also be in the order ``[length, batch, ...]``, as under sequence parallelism.
    Their gradients are then written to one buffer like it, which the projections' backward reads
    without a copy. Judged by strides and offsets alone, as fake tensors have them.

    Args:
        q: ``[batch, heads, length, head_dim]``.
        k: like ``q``.
        v: like ``q``.
    """
    batch, heads, _, head_dim = q.shape
    width = heads * head_dim
    rows = batch if _is_sequence_first(q) else 1
    return (
        q.shape == k.shape == v.shape
        and q.stride() == k.stride() == v.stride()
        and q.stride()[1:] == (head_dim, rows * 3 * width, 1)
        and k.storage_offset() - q.storage_offset() == width
        and v.storage_offset() - k.storage_offset() == width
    )


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Allocate the gradients of q, k and v: one buffer if ``stands_together``, else three.

    Args:
        q: ``[batch, heads, length, head_dim]``.
        k: like ``q``.
        v: like ``q``.

    Returns:
        One buffer ``[batch, length, 3, heads, head_dim]``, or three like q, k and v; see
        ``separate``.
    """
    if not stands_together(q, k, v):
        return [torch.empty_like(x) for x in (q, k, v)]
    batch, heads, length, head_dim = q.shape
    if _is_sequence_first(q):
        return [q.new_empty(length, batch, 3, heads, head_dim).transpose(0, 1)]
    return [q.new_empty(batch, length, 3, heads, head_dim)]


def _is_sequence_first(q: Tensor) -> bool:
    """Return whether a token's vectors of all batch rows are adjacent."""
    return q.size(0) > 1 and q.stride(0) < q.stride(2)


def separate(gradients: list[Tensor]) -> list[Tensor]:
    """Return the gradients of q, k and v as ``[batch, heads, length, head_dim]``."""
    if len(gradients) == 3:
        return gradients
    return [part.transpose(1, 2) for part in gradients[0].unbind(2)]


class LaunchPlan:
    """Tiles, linear tables and flags that the kernels of a call share.

    Args:
        call: arguments of the call.

    Raises:
        ValueError: there are too many positions, or the scale is not above 0.
    """

    def __init__(self, call: KernelCall) -> None:
        """See the class."""
        q = call.q
        self.call = call
        self.positions = RelativePositions(call.max_distance, call.buckets)
        self.p2c_sign = -1 if call.paper else 1
        self.batch, self.heads, self.length, self.head_dim = call.k.shape
        if self.length >= MAX_POSITIONS:
            raise ValueError(f"k: got {self.length} positions, expected below {MAX_POSITIONS}")
        self.capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
        self.tile = tile_size(q.dtype, call.gathered, self.capability)
        self.tiles = -(-self.length // self.tile)
        self.near = tables.near_tiles(self.positions, self.length, self.tile)
        self.far = self.tiles > self.near
        self.width = min(self.tiles, 2 * self.near - 1)
        self.key_form = self.query_form = None
        # A kernel's argument must be a tensor even where it is not read.
        self.key_table = self.query_table = q
        if call.pos_key is not None:
            self.key_form = self.linear_form(1)
            self.key_table = call.pos_key.index_select(1, self.key_form.slots)
        if call.pos_query is not None:
            self.query_form = self.linear_form(-self.p2c_sign)
            self.query_table = call.pos_query.index_select(1, self.query_form.slots)
        if not call.scale > 0:
            # The kernels take the maximum of a query's scores before they multiply by the scale.
            raise ValueError(f"scale: got {call.scale}, expected above 0")
        half = q.dtype != torch.float32
        # The largest power of two within the scale. Multiplying by it changes no rounding, except
        # of float16 table entries below 2**-14 / this, whose terms are negligible.
        exponent = min(math.frexp(call.scale)[1] - 1, 0) if half else 0
        self.pack_scale = 2.0**exponent
        self.flags = {
            "BLOCK": self.tile,
            "HEAD_DIM": self.head_dim,
            "C2P": self.key_form is not None,
            "P2C": self.query_form is not None,
            "HALF": half,
            "FAR": self.far,
            "RANGES": call.ranges is not None and not call.gathered,
            "EVEN": self.length % self.tile == 0,
            "DROP": call.seed is not None,
        }

    def linear_form(self, sign: int) -> tables.LinearTable:
        """Return the linear form of a table; ``sign`` is -1 for negated distances."""
        return tables.linear_table(self.positions, self.near, self.tile, sign, self.call.q.device)

    @property
    def grid(self) -> tuple[int]:
        """One program per tile of keys of each head and row."""
        return (self.tiles * self.batch * self.heads,)

    def launch(
        self, kernel: Any, *arguments: Any, grid: tuple[int, ...] | None = None, **constants: int
    ) -> None:
        """Launch a kernel.

        Args:
            kernel: the kernel, whose name chooses its launch settings.
            *arguments: its run-time arguments.
            grid: number of programs; None: one per tile of keys of each head and row.
            **constants: its compile-time arguments that are not in ``flags``, or differ.
        """
        setting = launch_setting(
            kernel.__name__.removesuffix("_kernel"),
            self.call.q.dtype, self.tile, self.head_dim, self.capability,
        )  # fmt: skip
        flags = {name: flag for name, flag in self.flags.items() if name in kernel.arg_names}
        kernel[grid or self.grid](*arguments, **(flags | constants), **setting.options)

    def packed_tables(self) -> tuple[Tensor, ...]:
        """Return the tables times ``pack_scale``, so that scaled products fit float16."""
        scale, both = self.pack_scale, (self.key_table, self.query_table)
        return tuple(x if scale == 1 or x is self.call.q else x * scale for x in both)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate a buffer on the call's device."""
        return torch.empty(shape, dtype=dtype, device=self.call.q.device)

    def end_products(self) -> list[Tensor]:
        """Return the products of queries and of keys with the ends of their tables, for far tiles.

        float32 ``[batch, heads, 2, length]`` each; a placeholder where it is not needed.
        """
        products = []
        for x, table, form in (
            (self.call.q, self.key_table, self.key_form),
            (self.call.k, self.query_table, self.query_form),
        ):
            out = x
            if self.far and form is not None:
                out = self.empty(self.batch, self.heads, 2, self.length)
                last = 2 * self.near * self.tile - 1
                self.launch(
                    consecutive.end_products_kernel, head_tensor(x), table, out, self.heads,
                    self.length, last,
                )  # fmt: skip
            products.append(out)
        return products

    def ranges(self) -> tuple[Tensor, ...]:
        """Return the visible keys' begin and end and the queries', or placeholders."""
        call = self.call
        return (call.q,) * 4 if call.gathered or call.ranges is None else call.ranges.unbind()

    @property
    def dropout(self) -> DropoutArguments:
        """Dropout as a kernel argument."""
        call = self.call
        if call.seed is None:
            return DropoutArguments(call.q, 0, 1.0, call.head_offset)
        threshold, scale = drop_threshold(call.dropout_p), keep_scale(call.dropout_p)
        return DropoutArguments(call.seed, threshold, scale, call.head_offset)


def forward(call: KernelCall) -> tuple[Tensor, Tensor]:
    """Run the forward pass.

    Returns:
        Output like ``q``, and the log2-sum-exp2 of the scores, float32 ``[batch, heads, length]``.
    """
    plan = LaunchPlan(call)
    output = torch.empty_like(call.q)
    lse2 = plan.empty(plan.batch, plan.heads, plan.length)
    plan.launch(
        consecutive.forward_kernel, *map(head_tensor, (call.q, call.k, call.v)),
        *plan.packed_tables(), *plan.end_products(), *plan.ranges()[:2], head_tensor(output), lse2,
        plan.dropout, plan.heads, plan.length, plan.near, call.scale * LOG2_E, 1 / plan.pack_scale,
    )  # fmt: skip
    return output, lse2


def backward(call: KernelCall, output: Tensor, lse2: Tensor, d_output: Tensor) -> Gradients:
    """Run the backward pass.

    Args:
        call: as in the forward pass.
        output: of the forward pass, ``[batch, heads, length, head_dim]``.
        lse2: of the forward pass, float32 ``[batch, heads, length]``.
        d_output: gradient of the output, like it; its last dimension is contiguous.
    """
    plan = LaunchPlan(call)
    q, k, v = call.q, call.k, call.v
    vectors = empty_gradients(q, k, v)
    d_q, d_k, d_v = separate(vectors)
    delta = plan.empty(*q.shape[:3])
    plan.launch(
        consecutive.output_products_kernel, head_tensor(output), head_tensor(d_output), delta,
        plan.heads, plan.length,
    )  # fmt: skip
    tile = plan.tile
    band = plan.empty(plan.batch, plan.heads, plan.tiles, plan.width, tile, tile, dtype=q.dtype)
    d_k_far, d_v_far = (plan.empty(*k.shape) if plan.far else q for _ in range(2))
    sums_shape = (plan.batch, plan.heads, 2, plan.length) if plan.far else (0,)
    q_sums, k_sums = plan.empty(*sums_shape), plan.empty(*sums_shape)
    key_begin, key_end, query_begin, query_end = plan.ranges()
    ends = plan.end_products()
    inputs = [head_tensor(x) for x in (q, k, v, d_output)]
    shape = (plan.heads, plan.length, plan.near)
    log2_scale = call.scale * LOG2_E
    wide = plan.head_dim >= WIDE_HEAD
    parts = ((True, False), (False, True)) if wide else ((True, True),)

    if plan.far:
        for values, keys in parts:
            plan.launch(
                consecutive.far_key_kernel, *inputs, plan.query_table, *ends, query_begin,
                query_end, lse2, delta, d_v_far, d_k_far, k_sums, plan.dropout, *shape, log2_scale,
                VALUES=values, KEYS=keys,
            )  # fmt: skip
    for scores, values in parts:
        plan.launch(
            consecutive.key_kernel, *inputs, *plan.packed_tables(), query_begin, query_end, lse2,
            delta, head_tensor(d_v), band, d_v_far, plan.dropout, *shape, plan.width, log2_scale,
            1 / plan.pack_scale, SCORES=scores, VALUES=values,
        )  # fmt: skip
    plan.launch(
        consecutive.key_gradient_kernel, inputs[0], plan.query_table, query_begin, query_end, band,
        d_k_far, head_tensor(d_k), *shape, plan.width, call.scale, CONTENT=True,
    )  # fmt: skip
    plan.launch(
        consecutive.query_gradient_kernel, *inputs, plan.key_table, *ends, key_begin, key_end, lse2,
        delta, band, head_tensor(d_q), q_sums, plan.dropout, *shape, plan.width, call.scale,
        log2_scale,
    )  # fmt: skip
    return *vectors, *table_gradients(plan, band, q_sums, k_sums)


_PROGRAMS = 512
"""Number of programs to aim at where the batch is split: a few per multiprocessor of a large GPU.
A constant, so that sums have the same order on every device."""


def table_gradients(
    plan: LaunchPlan, band: Tensor, q_sums: Tensor, k_sums: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of pos_key and pos_query.

    Args:
        plan: of the call.
        band: gradients of the scores of near tiles, as in ``backward``'s module docstring.
        q_sums: of ``query_gradient_kernel``, float32 ``[batch, heads, 2, length]``; read only if
            there are far tiles.
        k_sums: of ``far_key_kernel``, like ``q_sums``.
    """
    call = plan.call
    if plan.key_form is None and plan.query_form is None:
        return None, None
    chunk = min(plan.head_dim, 64)
    head_chunks = plan.heads * plan.head_dim // chunk
    splits = min(plan.batch, -(-_PROGRAMS // (head_chunks * 2 * plan.near)))
    shape = (splits, 2, plan.heads, 2 * plan.near, plan.tile, plan.head_dim)
    key_parts = plan.empty(*shape) if plan.key_form is not None else band
    query_parts = plan.empty(*shape) if plan.query_form is not None else band
    plan.launch(
        tables.table_gradient_kernel, head_tensor(call.q), head_tensor(call.k), band,
        *plan.ranges()[:2], key_parts, query_parts, plan.batch, plan.heads, plan.length, plan.near,
        plan.width, splits, grid=(2 * plan.near, head_chunks, splits), CHUNK=chunk,
    )  # fmt: skip
    d_pos_key = _fold(plan, call.pos_key, plan.key_form, key_parts, call.q, q_sums, False)
    d_pos_query = _fold(plan, call.pos_query, plan.query_form, query_parts, call.k, k_sums, True)
    return d_pos_key, d_pos_query


def _fold(
    plan: LaunchPlan,
    table: Tensor | None,
    form: tables.LinearTable | None,
    parts: Tensor,
    x: Tensor,
    sums: Tensor,
    negated: bool,
) -> Tensor | None:
    """Sum the gradient of one table by slot."""
    if table is None or form is None:
        return None
    end_splits = min(plan.batch * plan.tiles, -(-_PROGRAMS // plan.heads))
    ends = parts
    if plan.far:
        ends = plan.empty(plan.heads, 2, end_splits, plan.head_dim)
        plan.launch(
            consecutive.end_gradient_kernel, head_tensor(x), sums, ends, plan.batch, plan.heads,
            plan.length, end_splits, grid=(plan.heads, end_splits),
        )  # fmt: skip
    gradient = torch.empty(table.shape, dtype=table.dtype, device=table.device)
    plan.launch(
        tables.fold_kernel, parts, ends, form.rows, gradient, plan.heads, plan.near, parts.shape[0],
        end_splits, plan.call.scale, grid=(table.shape[1], plan.heads), NEGATED=negated, CHUNK=16,
    )  # fmt: skip
    return gradient

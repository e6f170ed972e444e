"""Launch of the kernels of gathered queries. No buffer is of size queries x keys.

Queries are best given in rising order of position, as the mask decoder does: a tile of them then
needs few blocks of the tables. Any order, and repeated positions, give the same results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_deberta.ops.triton import backward as backward_kernels
from megatron_deberta.ops.triton import gathered as kernels
from megatron_deberta.ops.triton.launch import (
    LOG2_E,
    Gradients,
    KernelCall,
    LaunchPlan,
    table_gradients,
)
from megatron_deberta.ops.triton.tiles import gathered_tensor, head_tensor


class _GatheredPlan(LaunchPlan):
    """The plan of a call with gathered queries."""

    def __init__(self, call: KernelCall) -> None:
        super().__init__(call)
        assert call.ranges is not None
        self.placement = call.ranges.unbind()
        self.queries = call.q.shape[2]
        self.tables = [self.key_table, self.query_table]
        if call.pos_query is not None:  # these kernels do not negate distances
            slots = self.linear_form(self.p2c_sign).slots
            self.tables[1] = call.pos_query.index_select(1, slots)
        self.query_grid = (-(-self.queries // self.tile) * self.batch * self.heads,)
        self.shape = (self.heads, self.queries, self.length, self.near)


def forward(call: KernelCall) -> tuple[Tensor, Tensor]:
    """Run the forward pass.

    Returns:
        Output like ``q``, and the log2-sum-exp2 of the scores, float32 ``[batch, heads, queries]``.
    """
    plan = _GatheredPlan(call)
    output = torch.empty_like(call.q)
    lse2 = plan.empty(*call.q.shape[:3])
    if plan.queries:
        kernels.gathered_forward_kernel[plan.query_grid](
            *map(gathered_tensor, (call.q, call.k, call.v)), *plan.tables, *plan.placement,
            gathered_tensor(output), lse2, plan.dropout, *plan.shape, call.scale * LOG2_E,
            **plan.flags("gathered_forward", "C2P", "P2C", "DROP"),
        )  # fmt: skip
    return output, lse2


def backward(call: KernelCall, output: Tensor, lse2: Tensor, d_output: Tensor) -> Gradients:
    """Run the backward pass; arguments as for ``launch.backward``."""
    plan = _GatheredPlan(call)
    q, k, v = call.q, call.k, call.v
    if not plan.queries:
        d_pos_key, d_pos_query = (
            None if x is None else torch.zeros_like(x) for x in (call.pos_key, call.pos_query)
        )
        d_q, d_k, d_v = map(torch.zeros_like, (q, k, v))
        return d_q, d_k, d_v, d_pos_key, d_pos_query
    delta = plan.empty(*q.shape[:3])
    backward_kernels.output_products_kernel[plan.query_grid](
        head_tensor(output), head_tensor(d_output), delta, plan.heads, plan.queries,
        **plan.flags("products"),
    )  # fmt: skip
    d_q, d_pos_key = _query_side(plan, lse2, delta, d_output)
    d_k, d_v, d_pos_query = _key_side(plan, lse2, delta, d_output)
    return d_q, d_k, d_v, d_pos_key, d_pos_query


def _query_side(
    plan: _GatheredPlan, lse2: Tensor, delta: Tensor, d_output: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of q and pos_key."""
    call, q = plan.call, plan.call.q
    d_q = plan.empty(*q.shape)
    by_row = plan.empty(0)
    if plan.key_form is not None:
        by_row = plan.empty(*q.shape[:3], plan.key_table.shape[1]).zero_()
    kernels.gathered_query_kernel[plan.query_grid](
        *map(gathered_tensor, (q, call.k, call.v, d_output)), *plan.tables, *plan.placement, lse2,
        delta, d_q, by_row, plan.dropout, *plan.shape, call.scale * LOG2_E,
        **plan.flags("gathered_query", "C2P", "P2C", "DROP"),
    )  # fmt: skip
    d_pos_key = None
    if plan.key_form is not None:
        d_q = d_q + torch.matmul(by_row, plan.key_table.float())
        # [heads, rows, batch * queries] x [heads, batch * queries, head_dim]
        by_head = by_row.permute(1, 3, 0, 2).flatten(2)
        d_rows = torch.bmm(by_head, q.permute(1, 0, 2, 3).flatten(1, 2).float())
        lengths = plan.key_form.rows.diff(dim=1)[:, 0].long()
        folded = torch.segment_reduce(
            d_rows.transpose(0, 1).contiguous(), "sum", lengths=lengths, unsafe=True
        )
        d_pos_key = (folded.transpose(0, 1) * call.scale).to(q.dtype).contiguous()
    return torch.empty_like(q).copy_(d_q * call.scale), d_pos_key


def _key_side(
    plan: _GatheredPlan, lse2: Tensor, delta: Tensor, d_output: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the gradients of k, v and pos_query."""
    call, q, k = plan.call, plan.call.q, plan.call.k
    d_v, d_k = torch.empty_like(call.v), torch.empty_like(k)
    d_k_part, k_sums = plan.empty(*k.shape), plan.empty(*k.shape[:2], 2, plan.length)
    band = plan.empty(0, dtype=q.dtype)
    if plan.query_form is not None:
        shape = (plan.batch, plan.heads, plan.tiles, plan.width, plan.tile, plan.tile)
        band = plan.empty(*shape, dtype=q.dtype).zero_()
    kernels.gathered_key_kernel[plan.grid](
        *map(gathered_tensor, (q, k, call.v, d_output)), *plan.tables, *plan.placement, lse2, delta,
        gathered_tensor(d_v), d_k_part, band, k_sums, plan.dropout, *plan.shape, plan.width,
        call.scale * LOG2_E, **plan.flags("gathered_key", "C2P", "P2C", "DROP"),
    )  # fmt: skip
    if plan.query_form is None:
        return d_k.copy_(d_k_part * call.scale), d_v, None
    # The band is by position, as if every position had a query. The kernel does not read Q.
    flags = {**plan.flags("key_gradient", "P2C", "RANGES", "EVEN"), "FAR": True}
    backward_kernels.key_gradient_kernel[plan.grid](
        head_tensor(k), plan.query_table, k, k, band, d_k_part, head_tensor(d_k), plan.heads,
        plan.length, plan.near, plan.width, call.scale, CONTENT=False, **flags,
    )  # fmt: skip
    by_position = LaunchPlan(call._replace(q=k, pos_key=None))
    return d_k, d_v, table_gradients(by_position, band, k_sums, k_sums)[1]

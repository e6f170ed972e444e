"""Launches the kernels of gathered queries. Stores nothing of size queries x keys.

Queries are best given in rising order, as the mask decoder does: a tile of them then needs few
blocks of the tables. Any order, and repeated positions, give the same results.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_deberta.ops.triton import backward as backward_kernels
from megatron_deberta.ops.triton import gathered as kernels
from megatron_deberta.ops.triton.launch import LOG2_E, Call, Plan, table_gradients
from megatron_deberta.ops.triton.tables import linear_table


class _GatheredPlan(Plan):
    """A plan whose queries stand at ``at`` and see the keys from ``low`` to ``high``."""

    def __init__(self, call: Call, at: Tensor) -> None:
        """Lays out a second table, of distances as they are.

        Args:
            call: with one range of keys a gathered query.
            at: int32 ``[3, batch, queries]``: position, first key seen, one past the last.
        """
        super().__init__(call, gathered=True)
        self.at = at
        self.queries = call.q.shape[2]
        self.plain_table = self.query_table
        if call.pos_query is not None:
            args = (call.positions, self.near, self.tile, call.p2c_sign, call.q.device)
            self.plain_table = call.pos_query.index_select(1, linear_table(*args).slots)

    @property
    def query_grid(self) -> tuple[int]:
        """One program a tile of gathered queries of each head and row."""
        return (-(-self.queries // self.tile) * self.batch * self.heads,)


def forward(call: Call, at: Tensor) -> tuple[Tensor, Tensor]:
    """The forward pass.

    Args:
        call: as for ``launch.forward``, with gathered queries and no ranges.
        at: int32 ``[3, batch, queries]``: position (-1: padding), first key seen, one past the
            last.

    Returns:
        Output like ``q``, and the log2-sum-exp2 of the scores, float32 ``[batch, heads, queries]``.
    """
    plan = _GatheredPlan(call, at)
    q, k, v = call.q, call.k, call.v
    output = torch.empty_like(q)
    lse2 = plan.empty(*q.shape[:3])
    if plan.queries:
        kernels.gathered_forward_kernel[plan.query_grid](
            q, k, v, plan.key_table, plan.plain_table, *at.unbind(), plan.seed, output, lse2,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *output.stride()[:3], plan.heads,
            plan.queries, plan.count, plan.near, call.scale * LOG2_E, *plan.dropout,
            **plan.flags("gathered_forward", "C2P", "P2C", "DROP"),
        )  # fmt: skip
    return output, lse2


def backward(
    call: Call, at: Tensor, output: Tensor, lse2: Tensor, d_output: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The backward pass.

    Args:
        call: as in the forward pass.
        at: as in the forward pass.
        output: of the forward pass.
        lse2: of the forward pass.
        d_output: gradient of the output; its last dimension is contiguous.

    Returns:
        Gradients of q, k, v, pos_key and pos_query.
    """
    plan = _GatheredPlan(call, at)
    q, k, v = call.q, call.k, call.v
    if not plan.queries:
        tables = (call.pos_key, call.pos_query)
        return (
            *(torch.zeros_like(x) for x in (q, k, v)),
            *(None if x is None else torch.zeros_like(x) for x in tables),
        )  # type: ignore[return-value]
    delta = plan.empty(*q.shape[:3])
    backward_kernels.output_products_kernel[plan.query_grid](
        output, d_output, delta, *output.stride()[:3], *d_output.stride()[:3], plan.heads,
        plan.queries, **plan.flags("products"),
    )  # fmt: skip
    d_q, d_pos_key = _query_side(plan, lse2, delta, d_output)
    d_k, d_v, d_pos_query = _key_side(plan, lse2, delta, d_output)
    return d_q, d_k, d_v, d_pos_key, d_pos_query


def _query_side(
    plan: _GatheredPlan, lse2: Tensor, delta: Tensor, d_output: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of q and pos_key."""
    call, q = plan.call, plan.call.q
    rows = plan.key_table.shape[1]
    d_q = plan.empty(*q.shape)
    by_row = plan.empty(0)
    if plan.key_form is not None:
        by_row = plan.empty(*q.shape[:3], rows).zero_()
    strides = [stride for x in (q, call.k, call.v, d_output) for stride in x.stride()[:3]]
    kernels.gathered_query_kernel[plan.query_grid](
        q, call.k, call.v, d_output, plan.key_table, plan.plain_table, *plan.at.unbind(), plan.seed,
        lse2, delta, d_q, by_row, *strides, plan.heads, plan.queries, plan.count, plan.near,
        call.scale * LOG2_E, *plan.dropout,
        **plan.flags("gathered_query", "C2P", "P2C", "DROP"),
    )  # fmt: skip
    d_pos_key = None
    if call.pos_key is not None and plan.key_form is not None:
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
    """Gradients of k, v and pos_query."""
    call, q, k = plan.call, plan.call.q, plan.call.k
    d_v, d_k = torch.empty_like(call.v), torch.empty_like(k)
    d_k_part, k_sums = plan.empty(*k.shape), plan.empty(*k.shape[:2], 2, plan.count)
    band = plan.empty(0, dtype=q.dtype)
    if plan.query_form is not None:
        shape = (plan.batch, plan.heads, plan.tiles, plan.width, plan.tile, plan.tile)
        band = plan.empty(*shape, dtype=q.dtype).zero_()
    strides = [stride for x in (q, k, call.v, d_output, d_v) for stride in x.stride()[:3]]
    kernels.gathered_key_kernel[plan.grid](
        q, k, call.v, d_output, plan.key_table, plan.plain_table, *plan.at.unbind(), plan.seed,
        lse2, delta, d_v, d_k_part, band, k_sums, *strides, plan.heads, plan.queries, plan.count,
        plan.near, plan.width, call.scale * LOG2_E, *plan.dropout,
        **plan.flags("gathered_key", "C2P", "P2C", "DROP"),
    )  # fmt: skip
    if plan.query_form is None:
        return d_k.copy_(d_k_part * call.scale), d_v, None
    # From here on positions are all there is, as if every position had a query; nothing reads Q.
    flags = {**plan.flags("key_gradient", "P2C", "EVEN"), "FAR": True, "RANGES": False}
    backward_kernels.key_gradient_kernel[plan.grid](
        k, plan.query_table, k, k, band, d_k_part, d_k, *k.stride()[:3], *d_k.stride()[:3],
        plan.heads, plan.count, plan.near, plan.width, call.scale, CONTENT=False, **flags,
    )  # fmt: skip
    by_position = replace(call, q=k, pos_key=None)
    d_pos_query = table_gradients(Plan(by_position, gathered=True), band, k_sums, k_sums)[1]
    return d_k, d_v, d_pos_query

"""Disentangled attention in blocks, forward and backward; memory O(length x block).

For devices without the fused kernels. On older GPUs `batched` computes all heads at once. On the
CPU, which is faster this way, a block is one head, some batch rows, some queries and all keys,
small enough to stay in cache. No block is kept; backward recomputes the scores and, as a function
of position, the dropout bits. With S the scores,
P = softmax(S), M the dropout mask, s its scale and o the output::

    o = s (P * M) v                          dv += s (P * M)^T do
    G = P * M * (s do v^T)                   dS = G - P rowsum(G)

Products and softmax are float32 (float64 for float64 inputs), whatever the input's type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_deberta.ops import batched
from megatron_deberta.ops.arguments import (
    AttentionArguments,
    hides_keys,
    query_positions,
    score_dtype,
    visible_keys,
)
from megatron_deberta.ops.dropout_bits import (
    consecutive_bytes,
    drop_threshold,
    gathered_bytes,
    keep_scale,
    pairs_of,
)
from megatron_deberta.ops.head_threads import for_heads
from megatron_deberta.ops.position_terms import (
    ConsecutiveTerms,
    GatheredTerms,
    PositionTerms,
    ScoreBlock,
    Scratch,
)

_BLOCK_ELEMENTS = 1 << 18
"""Scores per block. A few buffers of this size fit a core's second-level cache."""


def is_batched(device: torch.device) -> bool:
    """Return whether all heads are computed at once, rather than one by one in CPU threads."""
    return device.type != "cpu"


def attend(a: AttentionArguments) -> tuple[Tensor, Tensor | None]:
    """Compute attention block by block.

    Args:
        a: checked arguments.

    Returns:
        Output like ``q``, and if requested the log-sum-exp of the scores, float32
        ``[batch, heads, q_len]``.
    """
    output, lse = _ChunkedAttention.apply(*a)
    return output, lse


class _ChunkedAttention(torch.autograd.Function):
    """Autograd function of the formulas in the module docstring."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        a = AttentionArguments(*args)
        ctx.save_for_backward(*args[:5])
        ctx.options = args[5:]
        if is_batched(a.q.device):
            output, lse = batched.forward(a)
        else:
            output, lse = _forward(a)
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        a = AttentionArguments(*ctx.saved_tensors, *ctx.options)
        backward = batched.backward if is_batched(a.q.device) else _backward
        return (*backward(a, d_output), *(None for _ in ctx.options))


class Blocks:
    """Iterator over the blocks of a call, with their scores and masks.

    Args:
        a: checked arguments.
        tables: terms of longer rows, whose position tables and their gradients this call shares;
            None: laid out for this call.
    """

    def __init__(self, a: AttentionArguments, tables: ConsecutiveTerms | None = None) -> None:
        self.a = a
        self.batch, self.heads, self.q_len, self.head_dim = a.q.shape
        self.k_len = a.k.shape[2]
        self.dtype = score_dtype(a)
        self.scratch = Scratch(a.q, self.dtype)
        self.at = query_positions(a)
        self.terms: PositionTerms
        if a.q_positions is None:
            self.terms = ConsecutiveTerms(a, self.scratch, tables)
        else:
            self.terms = GatheredTerms(a, self.scratch, self.at)
        self.rows = batched.dropout_keys(a)
        self.bias: Tensor | None = None
        self.fully_masked: Tensor | None = None

    def __iter__(self) -> Iterator[ScoreBlock]:
        """Yield blocks; consecutive heads of the same rows and queries share masks."""
        queries = max(1, min(self.q_len, _BLOCK_ELEMENTS // max(1, self.k_len)))
        rows = max(1, _BLOCK_ELEMENTS // max(1, queries * self.k_len, self.terms.largest_product))
        for row in range(0, self.batch, rows):
            for query in range(0, self.q_len, queries):
                at_rows = slice(row, min(row + rows, self.batch))
                at_queries = slice(query, min(query + queries, self.q_len))
                self._set_masks(at_rows, at_queries)
                for head in range(self.heads):
                    yield ScoreBlock(head, at_rows, at_queries)

    def _set_masks(self, rows: slice, queries: slice) -> None:
        """Set the additive mask of some queries, and which of them see no key."""
        if not hides_keys(self.a):
            return
        at = self.at[rows, queries] if self.at.shape[0] > 1 else self.at[:, queries]
        visible = visible_keys(self.a, at, rows)
        self.fully_masked = ~visible.any(-1, keepdim=True)
        lowest = torch.finfo(self.dtype).min
        self.bias = torch.zeros(visible.shape, dtype=self.dtype, device=at.device)
        self.bias.masked_fill_(~visible, lowest)

    def queries(self, x: Tensor, block: ScoreBlock) -> Tensor:
        """Return the block's part of a tensor with a vector per query, in the dtype of the scores.

        Args:
            x: ``[batch, heads, q_len, head_dim]``.
            block: the block.

        Returns:
            ``[rows, queries, head_dim]``.
        """
        return x[block.rows, block.head, block.queries].to(self.dtype)

    def keys(self, x: Tensor, block: ScoreBlock) -> Tensor:
        """Return the block's part of a tensor with a vector per key, in the dtype of the scores.

        Args:
            x: ``[batch, heads, k_len, head_dim]``.
            block: the block.

        Returns:
            ``[rows, k_len, head_dim]``.
        """
        return x[block.rows, block.head].to(self.dtype)

    def buffer(self, name: str, block: ScoreBlock) -> Tensor:
        """Return a scratch buffer shaped like the block's scores."""
        rows = block.rows.stop - block.rows.start
        return self.scratch.get(name, rows, block.queries.stop - block.queries.start, self.k_len)

    def scores(self, q: Tensor, k: Tensor, block: ScoreBlock) -> Tensor:
        """Return the block's scores, with the lowest finite number added where keys are hidden.

        Args:
            q: the block's queries times the scale, ``[rows, queries, head_dim]``.
            k: the block's keys, ``[rows, k_len, head_dim]``.
            block: the block.

        Returns:
            ``[rows, queries, k_len]``; a buffer that the next block's scores overwrite.
        """
        scores = torch.bmm(q, k.transpose(1, 2), out=self.buffer("scores", block))
        self.terms.add_to(scores, q, k, block)
        return scores if self.bias is None else scores.add_(self.bias)

    def keep(self, block: ScoreBlock) -> Tensor | None:
        """Return the dropout mask in the dtype of the scores: 1 = keep, 0 = drop."""
        if self.rows is None:
            return None
        rows = self.rows[block.rows, block.head]
        if self.a.q_positions is None:
            pairs_at = pairs_of(block.queries)
            random = consecutive_bytes(rows[:, pairs_at], block.queries, self.k_len)
        else:
            at = self.at[block.rows] if self.at.shape[0] > 1 else self.at
            random = gathered_bytes(rows[:, block.queries], at[:, block.queries], self.k_len)
        threshold = drop_threshold(self.a.dropout_p)
        return torch.ge(random, threshold, out=self.buffer("keep", block))

    def zero_masked(self, x: Tensor) -> Tensor:
        """Return ``x`` with zeros for queries that see no key.

        Args:
            x: ``[rows, queries, n]``, of the present block.
        """
        return x if self.fully_masked is None else x.masked_fill(self.fully_masked, 0.0)


def _forward(a: AttentionArguments) -> tuple[Tensor, Tensor | None]:
    """Return output and log-sum-exp, on the CPU."""
    output = torch.empty_like(a.q)
    lse = a.q.new_empty(a.q.shape[:3], dtype=torch.float32) if a.return_lse else None

    def work(heads: slice) -> None:
        blocks = Blocks(select_heads(a, heads))
        forward_heads(blocks, output[:, heads], None if lse is None else lse[:, heads])

    for_heads(work, a.q.shape[1], _score_count(a))
    return output, lse


def _backward(a: AttentionArguments, d_output: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, pos_key and pos_query, on the CPU."""
    wide = score_dtype(a)
    d_q = torch.empty_like(a.q)
    d_k, d_v = torch.zeros_like(a.k, dtype=wide), torch.zeros_like(a.v, dtype=wide)
    d_pos_key, d_pos_query = (
        None if table is None else torch.empty_like(table) for table in (a.pos_key, a.pos_query)
    )

    def work(heads: slice) -> None:
        blocks = Blocks(select_heads(a, heads))
        backward_heads(blocks, *(x[:, heads] for x in (d_output, d_q, d_k, d_v)))
        blocks.terms.write_gradients(d_pos_key, d_pos_query, heads)

    for_heads(work, a.q.shape[1], _score_count(a))
    return d_q, d_k.to(a.k.dtype), d_v.to(a.v.dtype), d_pos_key, d_pos_query


def _score_count(a: AttentionArguments) -> int:
    return a.q[..., 0].numel() * a.k.shape[2]


def select_heads(a: AttentionArguments, heads: slice) -> AttentionArguments:
    """Return the same call for a slice of its heads."""
    key, query = (None if x is None else x[heads] for x in (a.pos_key, a.pos_query))
    q, k, v = (x[:, heads] for x in (a.q, a.k, a.v))
    offset = a.head_offset + heads.start
    return a._replace(q=q, k=k, v=v, pos_key=key, pos_query=query, head_offset=offset)


def forward_heads(blocks: Blocks, output: Tensor, lse: Tensor | None) -> None:
    """Compute the output, and the log-sum-exp of the scores if it is wanted.

    Args:
        blocks: the blocks of a call.
        output: ``[batch, heads, q_len, head_dim]``, like ``a.q``; written.
        lse: float32 ``[batch, heads, q_len]``; written. None: not wanted.
    """
    a = blocks.a
    factor = keep_scale(a.dropout_p)
    for block in blocks:
        q = blocks.queries(a.q, block) * a.scale
        scores = blocks.scores(q, blocks.keys(a.k, block), block)
        if lse is not None:
            value = torch.logsumexp(scores, -1, keepdim=True)
            if blocks.fully_masked is not None:
                value.masked_fill_(blocks.fully_masked, float("-inf"))
            lse[block.rows, block.head, block.queries] = value.squeeze(-1)
        probabilities = torch.softmax(scores, -1, out=scores)
        keep = blocks.keep(block)
        if keep is not None:
            probabilities.mul_(keep)
        mixed = torch.bmm(probabilities, blocks.keys(a.v, block)).mul_(factor)
        output[block.rows, block.head, block.queries] = blocks.zero_masked(mixed)


def backward_heads(blocks: Blocks, d_output: Tensor, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> None:
    """Write ``d_q`` and add to ``d_k``, ``d_v`` and the tables' gradients in ``blocks.terms``.

    Args:
        blocks: the blocks of a call.
        d_output: gradient of the output, ``[batch, heads, q_len, head_dim]``.
        d_q: ``[batch, heads, q_len, head_dim]``; written.
        d_k: ``[batch, heads, k_len, head_dim]``, in the dtype of the scores; added to.
        d_v: like ``d_k``; added to.
    """
    a = blocks.a
    factor = keep_scale(a.dropout_p)
    for block in blocks:
        q = blocks.queries(a.q, block) * a.scale
        k = blocks.keys(a.k, block)
        d_o = blocks.zero_masked(blocks.queries(d_output, block) * factor)
        scores = blocks.scores(q, k, block)
        probabilities = torch.softmax(scores, -1, out=scores)
        keep = blocks.keep(block)
        kept = probabilities if keep is None else keep.mul_(probabilities)
        d_v[block.rows, block.head].baddbmm_(kept.transpose(1, 2), d_o)
        v = blocks.keys(a.v, block)
        d_scores = torch.bmm(d_o, v.transpose(1, 2), out=blocks.buffer("gradient", block))
        d_scores.mul_(kept)
        d_scores.addcmul_(probabilities, d_scores.sum(-1, keepdim=True), value=-1)
        d_query = torch.bmm(d_scores, k)
        d_key = d_k[block.rows, block.head].baddbmm_(d_scores.transpose(1, 2), q)
        blocks.terms.add_gradients(d_scores, q, k, d_query, d_key, block)
        d_q[block.rows, block.head, block.queries] = d_query.mul_(a.scale)

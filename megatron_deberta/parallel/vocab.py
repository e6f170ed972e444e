"""Embedding and cross-entropy over a vocabulary split by rows over ranks.

Owns the lookup, the loss and the padding rows that make the vocabulary divide. Refuses to average:
the loss comes per token, and the caller knows the denominator. Without a group the same code is
the single-device path, so one rank and many run the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from megatron_deberta.parallel.collectives import (
    all_gather,
    group_rank,
    group_size,
    reduce_from,
    reduce_scatter_sequence,
)

IGNORED_LABEL = -100
"""Label of a token that has no loss."""

_BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}
"""Logits in fp32 at a time: what stays in a CPU's cache, what keeps a GPU busy."""


def vocab_parallel_embedding(
    ids: Tensor,
    weight_local: Tensor,
    vocab_start: int,
    group: ProcessGroup | None,
    *,
    sequence: bool,
) -> Tensor:
    """Look tokens up in a table whose rows are split over ranks.

    Collective over ``group``. Exact: every sum over ranks has one non-zero term.

    Args:
        ids: ``[B, N]`` int64, equal on all ranks.
        weight_local: ``[V/tp, C]``, rows ``vocab_start`` on.
        vocab_start: first row this rank holds.
        group: ranks the vocabulary is split over.
        sequence: leave each rank its own tokens (sequence parallelism) instead of all.

    Returns:
        ``[B, N, C]``, replicated, or ``[B, N/tp, C]`` of this rank's tokens.

    Raises:
        TopologyError: ``sequence`` and N does not divide by the number of ranks.
    """
    if group_size(group) == 1:
        return functional.embedding(ids, weight_local)
    rows = ids - vocab_start
    elsewhere = (rows < 0) | (rows >= weight_local.shape[0])
    found = functional.embedding(rows.masked_fill(elsewhere, 0), weight_local)
    found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
    return reduce_scatter_sequence(found, group) if sequence else reduce_from(found, group)


def vocab_parallel_cross_entropy(
    logits_local: Tensor,
    labels: Tensor,
    vocab_start: int,
    vocab_size_unpadded: int,
    group: ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy per token, and whether the likeliest piece is the right one.

    Collective over ``group`` in forward (one all-gather of maxima, one all-reduce), local in
    backward. Keeps the logits and a few numbers a token for backward; nothing else of the size of
    the logits exists but their gradient.

    Args:
        logits_local: ``[T, V/tp]`` fp32, bf16, fp16 (or fp64), this rank's columns.
        labels: ``[T]`` int64, equal on all ranks; -100 has no loss.
        vocab_start: vocabulary index of this rank's first column.
        vocab_size_unpadded: true size; columns from there on are padding and take no part.
        group: ranks the vocabulary is split over.

    Returns:
        Loss ``[T]`` in nats, fp32 (fp64 for fp64 logits), 0 where ignored; and ``[T]`` bool, True
        where the argmax over the whole vocabulary (the lowest index among equals) is the label.
        Both equal on all ranks.

    Raises:
        ValueError: on CPU, a label is neither -100 nor below ``vocab_size_unpadded``.
    """
    if labels.device.type == "cpu":
        wrong = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= vocab_size_unpadded))
        if bool(wrong.any()):
            raise ValueError(
                f"label {int(labels[wrong][0])} is outside model.vocab_size={vocab_size_unpadded}; "
                "the shards were made with another tokenizer"
            )
    loss, correct = _CrossEntropy.apply(
        logits_local, labels, vocab_start, vocab_size_unpadded, group
    )
    return cast(Tensor, loss), cast(Tensor, correct)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Rows a few at a time, so that no fp32 copy of all logits exists."""
    elements = _BLOCK_ELEMENTS["cuda" if logits.device.type == "cuda" else "cpu"]
    rows = max(1, elements // max(1, logits.shape[1]))
    for first in range(0, logits.shape[0], rows):
        yield slice(first, first + rows)


class _CrossEntropy(torch.autograd.Function):
    """loss = logsumexp(z) - z_label; d loss / d z = softmax(z) - onehot(label)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab_start: int,
        vocab_size: int,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        num_columns = min(max(vocab_size - vocab_start, 0), logits.shape[1])
        real = logits[:, :num_columns]
        maximum, best = _row_maximum(real)
        maxima = maximum.unsqueeze(0) if group is None else all_gather(maximum, group)
        # Lower ranks hold lower indices, and max gives the first of equals.
        top, winner = maxima.max(dim=0)

        columns = labels - vocab_start
        owned = (columns >= 0) & (columns < num_columns)
        columns = columns.masked_fill(~owned, 0)
        label_logits = top.new_zeros(top.shape)
        if num_columns:
            picked = real.gather(1, columns.unsqueeze(1)).squeeze(1).to(top.dtype)
            label_logits = torch.where(owned, picked - top, 0)
        hit = owned & (winner == group_rank(group)) & (best == columns)
        parts = torch.stack([_row_sum_exp(real, top), label_logits, hit.to(top.dtype)])
        if group is not None:
            dist.all_reduce(parts, group=group)
        sum_exp, label_logits, hits = parts
        counted = labels != IGNORED_LABEL
        loss = torch.where(counted, sum_exp.log() - label_logits, 0)
        correct = counted & (hits > 0)

        # Not their sum in the log: at logits far from zero it would round the softmax.
        ctx.save_for_backward(logits, top, sum_exp, columns, owned, counted)
        ctx.num_columns = num_columns
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, top, sum_exp, columns, owned, counted = ctx.saved_tensors
        scale = torch.where(counted, grads[0], 0).unsqueeze(1)
        num_columns = ctx.num_columns
        out = torch.empty_like(logits)
        out[:, num_columns:] = 0
        if num_columns == 0:
            return out, None, None, None, None
        label_part = torch.where(owned.unsqueeze(1), -scale, 0)
        softmax_part = scale / sum_exp.unsqueeze(1)
        for rows in _blocks(logits):
            block = logits[rows, :num_columns].to(scale.dtype, copy=True)
            block.sub_(top[rows].unsqueeze(1)).exp_().mul_(softmax_part[rows])
            block.scatter_add_(1, columns[rows].unsqueeze(1), label_part[rows])
            out[rows, :num_columns] = block
        return out, None, None, None, None


def _row_maximum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value ``[T]`` in at least fp32 and the first column that has it ``[T]``."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if logits.shape[1] == 0:
        empty = torch.full(logits.shape[:1], -torch.inf, dtype=dtype, device=logits.device)
        return empty, torch.full_like(empty, -1, dtype=torch.int64)
    maximum, column = logits.max(dim=1)
    return maximum.to(dtype), column


def _row_sum_exp(logits: Tensor, shift: Tensor) -> Tensor:
    """Sum of ``exp(logits - shift)`` over columns, ``[T]`` in the type of ``shift``."""
    out = torch.empty_like(shift)
    for rows in _blocks(logits):
        block = logits[rows].to(shift.dtype, copy=True)
        out[rows] = block.sub_(shift[rows].unsqueeze(1)).exp_().sum(dim=1)
    return out

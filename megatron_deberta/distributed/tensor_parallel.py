"""Row-parallel linear layer, vocabulary-parallel embedding, and each rank's part of the vocabulary.

A column-parallel layer is ``torch.nn.Linear`` with fewer outputs, behind
``copy_to_tensor_parallel_region`` or ``gather_from_sequence_parallel_region``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from megatron_deberta.distributed.collectives import (
    TokenOrder,
    all_gather,
    copy_to_tensor_parallel_region,
    group_rank,
    group_size,
    reduce_from_tensor_parallel_region,
    reduce_scatter_first,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron_deberta.ops.cross_entropy import Vocabulary


def vocab_parallel_embedding(
    ids: Tensor,
    weight_local: Tensor,
    vocab_start: int,
    group: ProcessGroup | None,
    *,
    sequence: bool,
) -> Tensor:
    """Look up tokens in a table whose rows are split over ranks. Collective over ``group``.

    Exact: every sum over ranks has one non-zero term.

    Args:
        ids: ``[B, N]`` int64, equal on all ranks.
        weight_local: ``[V/tp, C]``, rows from ``vocab_start``.
        vocab_start: first row of this rank.
        group: the tensor-parallel ranks.
        sequence: scatter the tokens over ranks (sequence parallelism).

    Returns:
        ``[B, N, C]``, replicated, or with ``sequence`` ``[B, N/tp, C]``.

    Raises:
        TopologyError: ``sequence``, and N is not divisible by the number of ranks.
    """
    if group_size(group) == 1:
        return functional.embedding(ids, weight_local)
    rows = ids - vocab_start
    elsewhere = (rows < 0) | (rows >= weight_local.shape[0])
    local = functional.embedding(rows.masked_fill(elsewhere, 0), weight_local)
    local = local.masked_fill(elsewhere.unsqueeze(-1), 0)
    if sequence:
        return reduce_scatter_to_sequence_parallel_region(local, group)
    return reduce_from_tensor_parallel_region(local, group)


def vocabulary_part(
    size: int, start: int, group: ProcessGroup | None, *, fuse: bool = False
) -> Vocabulary:
    """Return a rank's part of the vocabulary for `ops.cross_entropy.linear_cross_entropy`.

    Its functions are collective over ``group``: per chunk of tokens one all-gather and one
    all-reduce, and two more all-gathers where pieces are drawn.

    Args:
        size: of the whole vocabulary, without padding.
        start: vocabulary index of this rank's first row.
        group: the tensor-parallel ranks, in ascending order of their rows.
        fuse: use the kernels where they are supported.
    """
    if group is None:
        return Vocabulary(size, start, fuse)

    def total(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    return Vocabulary(size, start, fuse, group_rank(group), lambda x: all_gather(x, group), total)


def row_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup | None,
    *,
    sequence: bool,
    order: TokenOrder = "batch",
    adapter: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Apply a linear layer whose input features are split over ranks. Collective over ``group``.

    Args:
        x: ``[B, N, in/tp]``, this rank's input features of all tokens.
        weight: ``[out, in/tp]``, local.
        bias: ``[out]``, replicated, or None.
        group: the tensor-parallel ranks.
        sequence: scatter the output tokens over ranks (sequence parallelism).
        order: with ``sequence``, of the tokens: ``sequence``: ``x`` is a view of
            ``[N, B, in/tp]``; ``rank``: ``x`` is ``[tp * B, N/tp, in/tp]``.
        adapter: returns this rank's summand of what a low-rank adapter adds; None: there is none.

    Returns:
        ``[B, N, out]``, replicated, or with ``sequence`` ``[B, N/tp, out]``, contiguous.

    Raises:
        TopologyError: ``sequence``, and N is not divisible by the number of ranks.
    """

    def product(tokens: Tensor) -> Tensor:
        # First: selective recomputation stops before the product that is saved last.
        added = None if adapter is None else adapter(tokens)
        out = functional.linear(tokens, weight)
        return out if added is None else out + added

    if group_size(group) == 1 and x.device.type != "cpu" and adapter is None:
        # The bias is added inside the product. On CPU, where that is no faster, results keep
        # their rounding.
        return functional.linear(x, weight, bias)
    if sequence and group_size(group) > 1:
        if order == "batch":
            partial = product(x)
            out = reduce_scatter_to_sequence_parallel_region(partial, group)
        elif order == "sequence":
            partial = product(x.transpose(0, 1))
            out = reduce_scatter_first(partial, group).transpose(0, 1).contiguous()
        else:
            out = reduce_scatter_first(product(x), group)
        # Each rank adds the bias to its own tokens only, so the gradient must be summed.
        bias = None if bias is None else copy_to_tensor_parallel_region(bias, group)
    else:
        out = reduce_from_tensor_parallel_region(product(x), group)
    return out if bias is None else out + bias

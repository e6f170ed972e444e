"""Row-parallel linear layer.

A column-parallel layer is ``torch.nn.Linear`` with fewer outputs, behind
``copy_to_tensor_parallel_region`` or ``gather_from_sequence_parallel_region``.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from megatron_deberta.distributed.collectives import (
    TokenOrder,
    copy_to_tensor_parallel_region,
    group_size,
    reduce_from_tensor_parallel_region,
    reduce_scatter_first,
    reduce_scatter_to_sequence_parallel_region,
)


def row_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup | None,
    *,
    sequence: bool,
    order: TokenOrder = "batch",
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

    Returns:
        ``[B, N, out]``, replicated, or with ``sequence`` ``[B, N/tp, out]``, contiguous.

    Raises:
        TopologyError: ``sequence``, and N is not divisible by the number of ranks.
    """
    if group_size(group) == 1 and x.device.type != "cpu":
        # The bias is added inside the product. On CPU, where that is no faster, results keep
        # their rounding.
        return functional.linear(x, weight, bias)
    if sequence and group_size(group) > 1:
        if order == "batch":
            partial = functional.linear(x, weight)
            out = reduce_scatter_to_sequence_parallel_region(partial, group)
        elif order == "sequence":
            partial = functional.linear(x.transpose(0, 1), weight)
            out = reduce_scatter_first(partial, group).transpose(0, 1).contiguous()
        else:
            out = reduce_scatter_first(functional.linear(x, weight), group)
        # Each rank adds the bias to its own tokens only, so the gradient must be summed.
        bias = None if bias is None else copy_to_tensor_parallel_region(bias, group)
    else:
        out = reduce_from_tensor_parallel_region(functional.linear(x, weight), group)
    return out if bias is None else out + bias

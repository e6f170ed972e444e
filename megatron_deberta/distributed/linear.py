"""Row-parallel linear layers.

Owns the arithmetic beside the collectives: where a bias joins, whose gradient is only a part.
A column-parallel layer needs nothing from here: it is ``torch.nn.Linear`` with fewer outputs,
behind ``copy_to_tensor_parallel_region`` or
``gather_from_sequence_parallel_region``, which several such layers share.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from megatron_deberta.distributed.collectives import (
    copy_to_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


def row_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup | None,
    *,
    sequence: bool,
) -> Tensor:
    """A linear layer whose input features are split over ranks.

    Collective over ``group``.

    Args:
        x: ``[B, N, in/tp]``, this rank's input features of all tokens.
        weight: ``[out, in/tp]``, local.
        bias: ``[out]``, replicated, or None.
        group: ranks the input features are split over.
        sequence: leave each rank its own tokens (sequence parallelism) instead of all.

    Returns:
        ``[B, N, out]``, replicated, or ``[B, N/tp, out]`` of this rank's tokens.

    Raises:
        TopologyError: ``sequence`` and N does not divide by the number of ranks.
    """
    partial = functional.linear(x, weight)
    if not sequence:
        out = reduce_from_tensor_parallel_region(partial, group)
        return out if bias is None else out + bias
    out = reduce_scatter_to_sequence_parallel_region(partial, group)
    # Each rank adds the bias to its own tokens, so its gradient is a part.
    return out if bias is None else out + copy_to_tensor_parallel_region(bias, group)

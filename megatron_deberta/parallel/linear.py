"""Row-parallel linear layers, and norms on token shards.

Owns the arithmetic beside the collectives: where a bias joins, whose gradient is only a part.
A column-parallel layer needs nothing from here: it is ``torch.nn.Linear`` with fewer outputs,
behind ``copy_to`` or ``gather_sequence``, which several such layers share.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from megatron_deberta.parallel.collectives import copy_to, reduce_from, reduce_scatter_sequence


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
        out = reduce_from(partial, group)
        return out if bias is None else out + bias
    out = reduce_scatter_sequence(partial, group)
    # Each rank adds the bias to its own tokens, so its gradient is a part.
    return out if bias is None else out + copy_to(bias, group)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    group: ProcessGroup | None,
    *,
    sequence: bool,
) -> Tensor:
    """LayerNorm over the last dimension with replicated parameters.

    Collective over ``group`` in backward where ``sequence``.

    Args:
        x: ``[..., C]``, replicated, or this rank's tokens where ``sequence``.
        weight: ``[C]``, replicated.
        bias: ``[C]``, replicated.
        eps: added to the variance.
        group: ranks the tokens are split over.
        sequence: the rows differ by rank, so the parameters' gradients are summed over ranks.

    Returns:
        Like ``x``.
    """
    if sequence:
        weight, bias = copy_to(weight, group), copy_to(bias, group)
    return functional.layer_norm(x, weight.shape, weight, bias, eps)

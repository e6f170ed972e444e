"""Linear layers and norms on one rank's part of a layer.

Owns the arithmetic beside the collectives: where a bias joins, whose gradient is only a part.
Refuses to gather the input of a column-parallel layer: several layers share one gather, which
their caller places.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from megatron_deberta.errors import TopologyError
from megatron_deberta.parallel.collectives import copy_to, reduce_from, reduce_scatter_sequence


class ColumnParallelLinear(nn.Module):
    """A linear layer's output features of one rank; no communication.

    Its input must have passed ``copy_to`` (replicated rows) or ``gather_sequence`` (token shards),
    which sum the input's gradient over ranks.

    Attributes:
        weight: ``[out_features / tp, in_features]``, local.
        bias: ``[out_features / tp]``, local, or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp_size: int,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Create the local part, uninitialised.

        Args:
            in_features: input width.
            out_features: output width over all ranks.
            tp_size: ranks the output is split over.
            bias: whether there is one.
            dtype: of the parameters.
            device: of the parameters.

        Raises:
            TopologyError: ``tp_size`` does not divide ``out_features``.
        """
        super().__init__()
        if out_features % tp_size:
            raise TopologyError(
                f"{out_features} output features do not split over parallel.tensor_parallel_size="
                f"{tp_size}; choose a size that divides them"
            )
        local = out_features // tp_size
        self.weight = nn.Parameter(torch.empty(local, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(local, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to this rank's ``[..., out_features / tp]``."""
        return functional.linear(x, self.weight, self.bias)


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

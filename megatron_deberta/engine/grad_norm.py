"""Global gradient norm under tensor parallelism, and the clipping factor."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_deberta.distributed.topology import ProcessGroups

# Added to the norm before dividing by it, as in torch and DeepSpeed
CLIP_EPSILON = 1e-6
_BLOCK = 1 << 16


def global_grad_norm(gradients: Iterable[tuple[Tensor, bool]], groups: ProcessGroups) -> Tensor:
    """2-norm of the whole model's gradient. Collective over all ranks, which get the same value.

    Squares of sharded gradients are summed over tensor-parallel ranks, those of replicated ones
    count once. Sums are in fp64, so that the order of parameters does not matter.

    Args:
        gradients: (gradient averaged over data-parallel ranks, whether its parameter is split over
            tensor-parallel ranks).
        groups: process groups.

    Returns:
        The norm, fp64 scalar; inf if any element on any rank is not finite.
    """
    sharded = torch.zeros((), dtype=torch.float64, device=groups.device)
    replicated = torch.zeros_like(sharded)
    for gradient, is_sharded in gradients:
        square = _square_sum(gradient)
        if is_sharded:
            sharded += square
        else:
            replicated += square
    # Replicated squares are equal on every rank; their mean has the same bits.
    total = sharded + replicated / groups.tp_size
    if groups.tp_group is not None:
        dist.all_reduce(total, group=groups.tp_group)
    # MAX may drop nan.
    total = total.nan_to_num(nan=math.inf, posinf=math.inf)
    if groups.dp_group is not None:
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=groups.dp_group)
    return total.sqrt()


def _square_sum(gradient: Tensor) -> Tensor:
    """Sum of squares in fp64, as an fp64 scalar."""
    blocks = [gradient]
    if gradient.device.type == "cpu":
        # PyTorch copies the tensor to fp64 on a CPU; copies of blocks stay in the cache.
        blocks = list(gradient.flatten().split(_BLOCK))
    norms = torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks])
    return norms.square().sum()


def clip_coefficient(grad_norm: float, max_norm: float | None) -> float:
    """Factor that scales a gradient of norm ``grad_norm`` down to ``max_norm``; None: 1."""
    if max_norm is None:
        return 1.0
    return 1.0 / max(1.0, (grad_norm + CLIP_EPSILON) / max_norm)

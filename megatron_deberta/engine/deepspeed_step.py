"""One step of DeepSpeed's ZeRO optimizers with one wait for the device and few kernels.

They would wait for a check of overflows, for the norm and for its comparison with the limit of
clipping, and compute the norm of each parameter by kernels of its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import ReadNorm
from megatron_deberta.engine.deepspeed_runtime import patched
from megatron_deberta.engine.grad_norm import CLIP_EPSILON


class NormReading:
    """Reads the gradient norm of a step from the device, once.

    Attributes:
        norm: of the unscaled gradient; inf: not finite; None: not read.

    Args:
        read: see `ReadNorm`.
        scale: loss scale, a power of two.
    """

    def __init__(self, read: ReadNorm, scale: float) -> None:
        self._read, self._scale = read, scale
        self.norm: float | None = None
        self._is_rejected = False

    def rejects(self, scaled_norm: Tensor | float) -> bool:
        """Return whether the step makes no update: the norm is not finite or above the limit.

        DeepSpeed calls this for each parameter group; only the first call reads the norm.

        Args:
            scaled_norm: scalar on the device, 2-norm of the gradient times the loss scale; -1: not
                finite.
        """
        if self.norm is None:
            scaled = torch.as_tensor(scaled_norm).double()
            scaled_norm, limit = self._read(torch.where(scaled < 0, math.inf, scaled))
            # Exact, because the scale is a power of two
            norm = scaled_norm / self._scale
            self.norm = norm if math.isfinite(norm) else math.inf
            self._is_rejected = math.isinf(self.norm) or self.norm > limit
        return self._is_rejected

    def norm_on(self, device: torch.device) -> float:
        """Return the unscaled norm; inf if DeepSpeed found an overflow without it."""
        if self.norm is None:
            self.rejects(torch.full((), math.inf, device=device))
        assert self.norm is not None
        return self.norm

    def divisor(self, max_norm: float | None) -> float:
        """Return the number that unscales the gradient and clips it, if ``max_norm`` is given."""
        assert self.norm is not None
        clip = 1.0 if max_norm is None else max((self.norm + CLIP_EPSILON) / max_norm, 1.0)
        return clip * self._scale


@contextmanager
def leaner_step(
    optimizer: Any, reading: NormReading, groups: ProcessGroups, max_norm: float | None
) -> Iterator[None]:
    """Make one step of ZeRO 1 to 3 read the norm by ``reading``, which decides on the update.

    On CPU the results keep their bits. On a GPU, torch's fused AdamW unscales and clips while it
    reads the gradients.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        reading: of this step.
        groups: process groups.
        max_norm: limit of clipping; None: no clipping.
    """
    module, adam = sys.modules[type(optimizer).__module__], optimizer.optimizer
    names = ("cpu_offload", "offload_optimizer")
    offloaded = any(getattr(optimizer, name, False) for name in names)
    with ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patched(owner, name, value))

        patch(module, "is_invalid_grad_norm", reading.rejects)
        if hasattr(optimizer, "check_overflow") and groups.tp_size == 1 and not offloaded:
            # A gradient that is not finite makes the norm so. With tensor parallelism, the norm
            # contains replicated gradients of one rank only.
            patch(optimizer, "check_overflow", lambda *_, **__: None)
        if hasattr(module, "clip_tensors_by_global_norm") and hasattr(optimizer, "bf16_groups"):
            patch(module, "get_global_norm_of_tensors", _norm_function(groups))
            patch(module, "clip_tensors_by_global_norm", _clip_function(reading))
        elif hasattr(optimizer, "get_grad_norm_direct") and not offloaded:
            # Stages 1 and 2 sum over ranks in fp32, stage 3 in the norm's dtype.
            is_wide = hasattr(optimizer, "_get_norm_groups")
            patch(optimizer, "get_grad_norm_direct", _group_norm_function(groups, is_wide=is_wide))
        if can_fold(adam, groups.device) and not offloaded:
            _fold_clipping(patch, optimizer, module, reading, max_norm, groups.device)
            stack.callback(setattr, adam, "grad_scale", None)
        yield


def can_fold(adam: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether the optimizer divides gradients. On CPU, results keep their rounding."""
    return device.type != "cpu" and isinstance(adam, torch.optim.AdamW)


def _fold_clipping(
    patch: Callable[[Any, str, Any], None],
    optimizer: Any,
    module: Any,
    reading: NormReading,
    max_norm: float | None,
    device: torch.device,
) -> None:
    """Let torch's fused AdamW divide the gradients instead of a pass of their own."""

    def fold(*_: Any, **__: Any) -> None:
        divisor = torch.full((), reading.divisor(max_norm), dtype=torch.float32, device=device)
        optimizer.optimizer.grad_scale = divisor

    if hasattr(optimizer, "unscale_and_clip_grads"):
        patch(optimizer, "unscale_and_clip_grads", fold)
    else:
        patch(module, "clip_tensors_by_global_norm", fold)


def _squares(tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of squares in few kernels, a scalar of ``dtype``."""
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors], 2, dtype=dtype)
    return torch.stack(norms).pow(2).sum()


def _norm_function(groups: ProcessGroups) -> Callable[..., Tensor]:
    """Return the equivalent of ``get_global_norm_of_tensors`` of DeepSpeed's ``BF16_Optimizer``."""

    def norm_of(input_tensors: Sequence[Tensor], **_: Any) -> Tensor:
        total = _squares(input_tensors, torch.float32)
        if groups.tp_group is not None:
            dist.all_reduce(total, group=groups.tp_group)
        return total.pow(0.5)

    return norm_of


def _clip_function(reading: NormReading) -> Callable[..., None]:
    """Return the equivalent of ``clip_tensors_by_global_norm``, with the norm that was read."""

    def clip(input_tensors: Sequence[Tensor], max_norm: float, **_: Any) -> None:
        # As DeepSpeed computes it, in fp32.
        inverse = np.float32(1) / (np.float32(reading.norm) + np.float32(CLIP_EPSILON))
        coefficient = float(inverse * np.float32(max_norm))
        if coefficient < 1:
            torch._foreach_mul_([tensor.detach() for tensor in input_tensors], coefficient)

    return clip


def _group_norm_function(groups: ProcessGroups, *, is_wide: bool) -> Callable[..., Tensor]:
    """Return the equivalent of ``get_grad_norm_direct`` of ZeRO 1 to 3.

    Args:
        groups: process groups.
        is_wide: sum over ranks in DeepSpeed's dtype of norms (fp64 where there is one).
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter
    from deepspeed.runtime.zero.utils import get_norm_dtype

    def norm_of(gradients: Iterable[Tensor], params: Iterable[Tensor]) -> Tensor:
        real = (g for g in gradients if not getattr(g, "_zero_padding", False))
        own = [
            gradient
            for gradient, parameter in zip(real, params, strict=False)
            if is_model_parallel_parameter(parameter) or groups.tp_rank == 0
        ]
        dtype = get_norm_dtype()
        total = torch.zeros((), dtype=dtype, device=groups.device)
        if own:
            total = _squares(own, dtype)
        if not is_wide:
            total = total.float()
        for group in (groups.dp_group, groups.tp_group):
            if group is not None:
                dist.all_reduce(total, group=group)
        return total.pow(0.5)

    return norm_of

"""Reference engine in plain torch (``parallel.engine=plain``), the default of one CPU process.

Tests compare the DeepSpeed engine with it.

Nothing is sharded over data-parallel ranks: every rank keeps all master weights and moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import (
    Engine,
    LocalShard,
    Placements,
    ReadNorm,
    StepOutcome,
    norm_reader,
)
from megatron_deberta.engine.optimizer import (
    build_optimizer,
    clip_coefficient,
    global_grad_norm,
    parameter_groups,
    set_learning_rate,
)


class ReferenceEngine(Engine):
    """Engine in plain torch; see :class:`~megatron_deberta.engine.base.Engine`.

    Every trainable parameter has an fp32 master weight and an fp32 gradient sum. In fp32 the master
    weight is the parameter itself; in fp64, which only tests use, master weight, gradient sum and
    moments are fp64, too.
    """

    def __init__(
        self, config: RunConfig, module: nn.Module, specs: Placements, groups: ProcessGroups
    ) -> None:
        super().__init__(config, module, groups)
        masters = {name: _master_weight(p) for name, p in self._trainable.items()}
        self._masters = list(masters.values())
        self._is_sharded = [specs[name].dim is not None for name in self._trainable]
        self._adam = build_optimizer(
            parameter_groups(masters.items(), config.optimizer.weight_decay, self._rate_scales),
            config.optimizer,
            allow_apex=groups.device.type == "cuda",
        )
        self._create_state()
        self._gradients: list[Tensor | None] = [None] * len(self._masters)

    def backward(self, loss: Tensor) -> None:
        """Backpropagate one micro batch and add its gradients in fp32."""
        (loss * self._loss_scale.scale).backward()
        for index, parameter in enumerate(self._trainable.values()):
            if parameter.grad is None:
                continue
            new, total = parameter.grad.to(_master_dtype(parameter)), self._gradients[index]
            # The first gradient becomes the sum: a pass over all weights costs time on a CPU.
            self._gradients[index] = new if total is None else total.add_(new)
            parameter.grad = None

    def step(self, learning_rate: float, norm_limit: float | ReadNorm = math.inf) -> StepOutcome:
        """Average over data-parallel ranks, unscale, clip and update."""
        scale = self._loss_scale.scale
        gradients = self._take_gradients()
        divisor = scale * self._groups.dp_size
        for gradient in gradients:
            if self._groups.dp_group is not None:
                dist.all_reduce(gradient, group=self._groups.dp_group)
            if divisor != 1.0:
                gradient /= divisor
        norm = global_grad_norm(zip(gradients, self._is_sharded, strict=True), self._groups)
        grad_norm, limit = norm_reader(norm_limit)(norm)
        overflow = not math.isfinite(grad_norm)
        skipped = overflow or grad_norm > limit
        if not skipped:
            coefficient = clip_coefficient(grad_norm, self._clip_grad_norm)
            self._update(gradients, learning_rate, coefficient)
        self._loss_scale.update(overflow)
        return StepOutcome(grad_norm, skipped, scale)

    def local_shards(self) -> Iterator[LocalShard]:
        """Yield whole states; every rank holds them."""
        masters = dict(zip(self._trainable, self._masters, strict=True))
        for name, parameter in self.module.named_parameters():
            tensors: tuple[Tensor, ...] = (parameter,)
            if name in masters:
                master = masters[name]
                tensors = (master, *(self._adam.state[master][key] for key in self._state_keys))
            yield LocalShard(name, 0, tuple(tensor.detach().view(-1) for tensor in tensors))

    def destroy(self, *, is_last: bool = True) -> None:
        """Do nothing: this engine has no hooks and changes no process state."""

    def _take_gradients(self) -> list[Tensor]:
        """Return the summed gradients, and forget them."""
        # Zeros for unused parameters, as in DeepSpeed: weights and moments still decay.
        gradients = [
            torch.zeros_like(master) if gradient is None else gradient
            for gradient, master in zip(self._gradients, self._masters, strict=True)
        ]
        self._gradients = [None] * len(gradients)
        return gradients

    def _update(self, gradients: list[Tensor], learning_rate: float, coefficient: float) -> None:
        set_learning_rate(self._adam, learning_rate)
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient if coefficient == 1.0 else gradient.mul_(coefficient)
        self._adam.step()
        self._adam.zero_grad()
        self._update_averages()
        self._publish_weights()

    @torch.no_grad()
    def _publish_weights(self) -> None:
        for parameter, master in zip(self._trainable.values(), self._masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)


def _master_dtype(parameter: nn.Parameter) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _master_weight(parameter: nn.Parameter) -> nn.Parameter:
    dtype = _master_dtype(parameter)
    if parameter.dtype == dtype:
        return parameter
    return nn.Parameter(parameter.detach().to(dtype, copy=True))

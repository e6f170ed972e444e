"""The engine written out in plain torch: what DeepSpeed must agree with.

Owns nothing sharded over data-parallel ranks: every rank keeps all master weights and moments.
Refuses speed; read it to know what an update is, run it to check the other engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.grad_norm import clip_coefficient, global_grad_norm
from megatron_deberta.engine.loss_scale import DynamicLossScale
from megatron_deberta.engine.optimizer import (
    MOMENTS,
    adam_step,
    build_optimizer,
    parameter_groups,
    set_adam_step,
)
from megatron_deberta.engine.protocol import (
    FetchState,
    ParameterState,
    Placements,
    StepOutcome,
)


class ReferenceEngine:
    """See :class:`~megatron_deberta.engine.protocol.Engine`.

    Every trainable parameter has a master weight in fp32, whose ``grad`` collects the micro
    batches in fp32. In fp32 the master is the parameter itself.
    """

    def __init__(
        self, config: RunConfig, module: nn.Module, specs: Placements, groups: ProcessGroups
    ) -> None:
        self._module = module
        self._groups = groups
        self._clip_grad_norm = config.optimizer.clip_grad_norm
        self._loss_scale = DynamicLossScale(config.precision)
        self._working = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._masters = {name: _master_of(p) for name, p in self._working.items()}
        self._is_sharded = {name: specs[name].dim is not None for name in self._working}
        self._optimizer = build_optimizer(
            parameter_groups(self._masters.items(), config.optimizer.weight_decay),
            config.optimizer,
            allow_apex=groups.device.type == "cuda",
        )
        # Unused parameters get zeros, as from DeepSpeed: they decay, and so do their moments.
        self._gradients = {name: torch.zeros_like(m) for name, m in self._masters.items()}

    @property
    def module(self) -> nn.Module:
        """The model as it was given."""
        return self._module

    def backward(self, loss: Tensor) -> None:
        """Backpropagate one micro batch and add its gradients up in fp32."""
        (loss * self._loss_scale.scale).backward()
        for name, parameter in self._working.items():
            if parameter.grad is not None:
                self._gradients[name] += parameter.grad.to(torch.float32)
                parameter.grad = None

    def step(self, learning_rate: float, norm_limit: float = math.inf) -> StepOutcome:
        """Average over data-parallel ranks, take the loss scale out, clip, update."""
        scale = self._loss_scale.scale
        for gradient in self._gradients.values():
            if self._groups.dp_group is not None:
                dist.all_reduce(gradient, group=self._groups.dp_group)
            gradient /= scale * self._groups.dp_size
        grad_norm = global_grad_norm(
            ((gradient, self._is_sharded[name]) for name, gradient in self._gradients.items()),
            self._groups,
        )
        overflow = not math.isfinite(grad_norm)
        skipped = overflow or grad_norm > norm_limit
        if not skipped:
            self._update(learning_rate, clip_coefficient(grad_norm, self._clip_grad_norm))
        for gradient in self._gradients.values():
            gradient.zero_()
        self._loss_scale.update(overflow)
        return StepOutcome(grad_norm, skipped, scale)

    def gather_states(self) -> Iterator[tuple[str, ParameterState]]:
        """Yield copies: every rank holds all of them, so nothing is communicated."""
        for name, master in self._masters.items():
            state = self._optimizer.state.get(master, {})
            moments = [state.get(key, torch.zeros_like(master)) for key in MOMENTS]
            yield name, ParameterState(*(_cpu_copy(t) for t in (master, *moments)))

    @torch.no_grad()
    def load_states(self, fetch: FetchState) -> None:
        """Set master weights and moments, and round the masters into the model."""
        for name, master in self._masters.items():
            state = fetch(name)
            master.copy_(state.weight)
            for key in MOMENTS:
                moment = getattr(state, key).to(master.device, copy=True)
                self._optimizer.state[master][key] = moment
        set_adam_step(self._optimizer, self._masters.values(), 0)
        self._round_masters()

    def state_dict(self) -> dict[str, int | float]:
        """Adam's step count, the loss scale and its counters."""
        steps = adam_step(self._optimizer, self._masters.values())
        return {"adam_step": steps, **self._loss_scale.state_dict()}

    def load_state_dict(self, scalars: Mapping[str, int | float]) -> None:
        """Set what :meth:`state_dict` gave."""
        set_adam_step(self._optimizer, self._masters.values(), int(scalars["adam_step"]))
        self._loss_scale.load_state_dict(scalars)

    def destroy(self) -> None:
        """Nothing is hooked or held elsewhere."""

    def _update(self, learning_rate: float, coefficient: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        for name, master in self._masters.items():
            master.grad = self._gradients[name].mul_(coefficient)
        self._optimizer.step()
        for master in self._masters.values():
            master.grad = None
        self._round_masters()

    @torch.no_grad()
    def _round_masters(self) -> None:
        for name, parameter in self._working.items():
            if parameter is not self._masters[name]:
                parameter.copy_(self._masters[name])


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().to(torch.float32, copy=True))


def _cpu_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)

"""Interface of the engines, and the reference engine in plain torch.

Tests compare the DeepSpeed engine with the reference engine, which shards nothing over
data-parallel ranks: every rank keeps all master weights and moments.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.optimizer import (
    EMA,
    MOMENTS,
    adam_step,
    build_optimizer,
    clip_coefficient,
    global_grad_norm,
    parameter_groups,
    rate_scales,
    set_adam_step,
    set_learning_rate,
)
from megatron_deberta.engine.schedule import DynamicLossScale
from megatron_deberta.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ParameterState:
    """Master weight, Adam moments and average of one parameter, as checkpoints store them.

    All are fp32 CPU tensors of the parameter's local shape: this rank's tensor-parallel
    shard, not partitioned over data-parallel ranks.

    Attributes:
        weight: master weight.
        exp_avg: Adam's first moment; zeros before the first step.
        exp_avg_sq: Adam's second moment; zeros before the first step.
        ema: moving average of the weight; None: the run keeps none, or it starts at the weight.
    """

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    ema: Tensor | None = None


class LocalShard(NamedTuple):
    """The part of a parameter's state that this rank holds.

    Attributes:
        name: canonical name.
        start: its first index in the flattened tensor-parallel shard of the parameter.
        tensors: flat fp32 tensors of weight and moments, and of the average if there is one.
    """

    name: str
    start: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of one optimizer step.

    Attributes:
        grad_norm: 2-norm of the unscaled gradient of the whole model before clipping; inf if not
            finite.
        skipped: True if nothing was updated, because the norm is not finite or above the limit.
        loss_scale: loss scale of this step; 1 outside fp16.
    """

    grad_norm: float
    skipped: bool
    loss_scale: float


class ParameterPlacement(Protocol):
    """The attribute of ``ParameterSpec`` that engines use."""

    @property
    def dim(self) -> int | None:
        """Dimension split over tensor-parallel ranks; None: replicated."""


# Placement by canonical parameter name
Placements = Mapping[str, ParameterPlacement]

# Given the gradient norm (scalar on the device, possibly times the loss scale; not finite: an
# overflow), returns it and the largest unscaled norm with which the update is made
ReadNorm = Callable[[Tensor], tuple[float, float]]

# Returns this rank's tensor-parallel shard of a parameter's state, by canonical name
FetchState = Callable[[str], ParameterState]


def norm_reader(norm_limit: float | ReadNorm) -> ReadNorm:
    """Return the function that reads the norm, for either kind of limit of ``Engine.step``."""
    if callable(norm_limit):
        return norm_limit
    return lambda norm: (float(norm), norm_limit)


class Engine(ABC):
    """Backward, gradient reduction, clipping and the optimizer.

    Gradients are summed over the micro batches of a step and averaged over data-parallel ranks;
    the caller scales the loss. All methods are collective but ``state_dict`` and ``local_shards``.

    Attributes:
        module: the model to call; its ``named_parameters`` are the canonical names.
        _masters: the fp32 tensors that ``_adam`` updates.
    """

    _adam: torch.optim.Optimizer
    _masters: Sequence[Tensor]

    def __init__(self, config: RunConfig, module: nn.Module, groups: ProcessGroups) -> None:
        self.module = module
        self._groups = groups
        self._clip_grad_norm = config.optimizer.clip_grad_norm
        self._ema_decay = config.optimizer.ema_decay
        self._state_keys = (*MOMENTS, EMA) if self._ema_decay is not None else MOMENTS
        self._loss_scale = DynamicLossScale(config.precision)
        self._trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._rate_scales = rate_scales(list(self._trainable), config.optimizer)

    @property
    def parts(self) -> tuple[Engine, ...]:
        """The engines whose ``step`` is called one after the other; this one unless overridden."""
        return (self,)

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Backpropagate the loss (scalar) of one micro batch and accumulate its gradients."""

    @abstractmethod
    def step(self, learning_rate: float, norm_limit: float | ReadNorm = math.inf) -> StepOutcome:
        """Clip the accumulated gradients, update the weights and clear the gradients.

        The host waits for the device once, for the norm.

        Args:
            learning_rate: of this update.
            norm_limit: the update is skipped if the gradient norm is above this, which must be
                equal on all ranks; a negative limit always skips. Or a function that is called
                once, so that the caller reads other numbers from the device together with the norm.

        Raises:
            LossScaleError: the gradient overflows fp16 at the smallest loss scale.
        """

    def set_accumulation_steps(self, accumulation_steps: int) -> None:
        """Set the number of micro batches of the following steps; call it between steps.

        Raises:
            ValueError: not at least one.
        """
        if accumulation_steps < 1:
            raise ValueError(f"{accumulation_steps} accumulation steps; use at least 1")

    @abstractmethod
    def local_shards(self) -> Iterator[LocalShard]:
        """Yield what this rank holds of every parameter's state, in the module's order.

        Not collective. A shard may be empty. Its tensors are views of the master weights and
        moments, on any device; of a frozen parameter, of the weight alone, in the format in which
        the module computes.
        """

    @torch.no_grad()
    def load_states(self, fetch: FetchState) -> None:
        """Set every parameter and its moments; ``fetch`` is called in the module's order.

        Adam's step count is 0 until ``load_state_dict``; with zero moments the optimizer is fresh.
        """
        for name, start, tensors in self.local_shards():
            state = fetch(name)
            average = state.weight if state.ema is None else state.ema
            values = (state.weight, state.exp_avg, state.exp_avg_sq, average)
            for held, value in zip(tensors, values, strict=False):
                held.copy_(value.flatten()[start : start + len(held)])
        set_adam_step(self._adam, self._masters, 0)
        self._publish_weights()

    def _publish_weights(self) -> None:
        """Copy the master weights into the working weights of all ranks."""
        raise NotImplementedError

    def _create_state(self) -> None:
        """Create moments of zeros, so that they can be read and written before the first step.

        The average, if the run keeps one, starts at the weights.
        """
        for master in self._masters:
            state = self._adam.state[master]
            state |= {key: torch.zeros_like(master) for key in MOMENTS}
            if self._ema_decay is not None:
                state[EMA] = master.detach().clone()
        set_adam_step(self._adam, self._masters, 0)

    def state_dict(self) -> dict[str, int | float]:
        """Return the rest of the state: Adam's step count, the loss scale and its counters."""
        return {
            "adam_step": adam_step(self._adam, self._masters),
            **self._loss_scale.state_dict(),
        }

    def load_state_dict(self, scalars: Mapping[str, int | float]) -> None:
        """Restore the values of ``state_dict``; call it after ``load_states``."""
        try:
            set_adam_step(self._adam, self._masters, int(scalars["adam_step"]))
            self._loss_scale.load_state_dict(scalars)
        except KeyError as error:
            raise CheckpointError(
                f"the checkpoint's engine state lacks {error}; resume from another one"
            ) from error

    @torch.no_grad()
    def _update_averages(self) -> None:
        """Move the averages towards the weights of an update."""
        if self._ema_decay is not None:
            averages = [self._adam.state[master][EMA] for master in self._masters]
            torch._foreach_lerp_(averages, list(self._masters), 1 - self._ema_decay)

    @abstractmethod
    def destroy(self, *, is_last: bool = True) -> None:
        """Release hooks and buffers and restore environment variables that the engine has set.

        Call it on every way out of a run; the engine cannot be used afterwards.

        Args:
            is_last: no other engine of this process needs its process group.
        """


class ReferenceEngine(Engine):
    """Engine in plain torch; see :class:`Engine`.

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

"""DeepSpeed engine: ZeRO 0 to 3 in fp32, ZeRO 1 to 3 in bf16 and fp16.

Workarounds for DeepSpeed's behaviour are listed in docs/engine.md. DeepSpeed's checkpoints,
schedules, data loaders and printing are not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import (
    Engine,
    FetchState,
    HeldState,
    ParameterState,
    Placements,
    ReadNorm,
    StepOutcome,
    norm_reader,
)
from megatron_deberta.engine.deepspeed_config import deepspeed_config
from megatron_deberta.engine.deepspeed_runtime import (
    add_gradients_directly,
    deepspeed_environment,
    end_single_process,
    environment_variables,
    import_deepspeed,
    local_rank_variable,
    model_parallel_unit,
    overlapped_reduction,
    start_single_process,
)
from megatron_deberta.engine.deepspeed_state import ShardedState
from megatron_deberta.engine.deepspeed_step import NormReading, leaner_step
from megatron_deberta.engine.grad_norm import clip_coefficient, global_grad_norm
from megatron_deberta.engine.loss_scale import DynamicLossScale
from megatron_deberta.engine.optimizer import (
    build_optimizer,
    parameter_groups,
    set_adam_step,
    set_learning_rate,
)


class DeepSpeedZeroEngine(Engine):
    """Engine on DeepSpeed; see :class:`~megatron_deberta.engine.base.Engine`.

    Every step has the given number of micro batches, because DeepSpeed must know the last one
    before its backward.

    Raises:
        ConfigError: stage 0 with a 16-bit format.
    """

    def __init__(
        self, config: RunConfig, module: nn.Module, specs: Placements, groups: ProcessGroups
    ) -> None:
        super().__init__(config, module, groups)
        settings = deepspeed_config(config, groups.dp_size)
        self._stage: int = config.precision.zero_stage
        self._micro_batches: int = settings["gradient_accumulation_steps"]
        self._accumulated = 0
        for name, parameter in self._trainable.items():
            if specs[name].dim is not None:
                # DeepSpeed omits other ranks' shards of unmarked parameters from the norm.
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        self._adam = build_optimizer(
            parameter_groups(
                self._trainable.items(), config.optimizer.weight_decay, self._rate_scales
            ),
            config.optimizer,
            # apex counts steps per group, but stage 3 steps once per partition of a group.
            allow_apex=groups.device.type == "cuda"
            and self._stage < 3
            and not config.precision.offload_optimizer,
            offloads=config.precision.offload_optimizer,
        )
        with ExitStack() as shared, ExitStack() as stack:
            deepspeed = import_deepspeed(groups.device)
            start_single_process(groups)
            shared.callback(end_single_process, groups)
            stack.enter_context(environment_variables(local_rank_variable(groups)))
            with deepspeed_environment(groups), overlapped_reduction(groups):
                self._engine: Any = deepspeed.initialize(
                    model=module,
                    optimizer=self._adam,
                    config=settings,
                    mpu=model_parallel_unit(groups),
                )[0]
            self._process_state, self._shared_state = stack.pop_all(), shared.pop_all()
        add_gradients_directly(self._engine.optimizer)
        if self._loss_scale.dynamic:
            scaler = _ExternalLossScaler(self._loss_scale, groups.device)
            self._engine.optimizer.loss_scaler = scaler
        self._state = ShardedState(self._engine, has_average=self._ema_decay is not None)
        self._masters = self._state.masters

    def backward(self, loss: Tensor) -> None:
        """Backpropagate one micro batch; the last one of a step reduces over ranks.

        Raises:
            RuntimeError: more micro batches than the run's accumulation steps.
        """
        if self._accumulated == self._micro_batches:
            raise RuntimeError(f"backward: step() is due after {self._micro_batches} losses")
        self._accumulated += 1
        # What DeepSpeedEngine.forward does; the model is called directly.
        if self._stage:
            self._engine.optimizer.clear_backward_seen_flag()
        loss.register_hook(lambda _: self._engine._backward_prologue())
        self._engine.set_gradient_accumulation_boundary(self._accumulated == self._micro_batches)
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, learning_rate: float, norm_limit: float | ReadNorm = math.inf) -> StepOutcome:
        """Clip and update.

        Raises:
            LossScaleError: an overflow at the smallest loss scale.
            RuntimeError: fewer micro batches than the run's accumulation steps.
        """
        if self._accumulated != self._micro_batches:
            raise RuntimeError(
                f"step: {self._accumulated} losses accumulated, {self._micro_batches} expected"
            )
        self._accumulated = 0
        set_learning_rate(self._adam, learning_rate)
        scale = self._loss_scale.scale
        if self._stage:
            reading = NormReading(norm_reader(norm_limit), scale)
            with leaner_step(self._engine.optimizer, reading, self._groups, self._clip_grad_norm):
                self._engine.step()
            grad_norm = reading.norm_on(self._groups.device)
            skipped = bool(self._engine.optimizer.overflow)
        else:
            grad_norm, skipped = self._step_unsharded(norm_reader(norm_limit))
        if not skipped:
            self._update_averages()
        # After the step, which divides the gradients by the scale their loss was multiplied by.
        self._loss_scale.update(overflow=math.isinf(grad_norm))
        return StepOutcome(grad_norm, skipped, scale)

    def set_accumulation_steps(self, accumulation_steps: int) -> None:
        """Set the number of micro batches of the following steps.

        Raises:
            RuntimeError: in the middle of a step.
        """
        super().set_accumulation_steps(accumulation_steps)
        if self._accumulated:
            raise RuntimeError("set_accumulation_steps: a step is not complete")
        self._micro_batches = accumulation_steps
        # Like DeepSpeed's set_train_batch_size, which leaves its ZeRO optimizer's copy unchanged.
        self._engine._config.gradient_accumulation_steps = accumulation_steps
        if self._stage:
            self._engine.optimizer.gradient_accumulation_steps = accumulation_steps

    def gather_states(self) -> Iterator[tuple[str, ParameterState]]:
        """Assemble one parameter at a time from the partitions of the data-parallel ranks."""
        for name, parameter in self._trainable.items():
            yield name, self._state.gather(parameter)

    def held_states(self) -> Iterator[HeldState]:
        """Yield this rank's partitions; at stage 0 every rank holds whole states."""
        for name, parameter in self._trainable.items():
            yield name, *self._state.held(parameter)

    def load_states(self, fetch: FetchState) -> None:
        """Set master weights and moments, then the working weights of all ranks."""
        for name, parameter in self._trainable.items():
            self._state.scatter(parameter, fetch(name))
        self._state.publish()
        set_adam_step(self._adam, self._masters, 0)

    def destroy(self, *, is_last: bool = True) -> None:
        """Remove DeepSpeed's hooks; restore process groups and environment variables."""
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()
        self._engine.destroy()
        self._process_state.close()
        if is_last:
            self._shared_state.close()

    def _step_unsharded(self, read: ReadNorm) -> tuple[float, bool]:
        """Step of stage 0, where DeepSpeed reports no norm. Returns the norm and if skipped."""
        gradients = {name: p.grad for name, p in self._trainable.items() if p.grad is not None}
        marked = (
            (gradient, hasattr(self._trainable[name], "tensor_model_parallel"))
            for name, gradient in gradients.items()
        )
        grad_norm, limit = read(global_grad_norm(marked, self._groups))
        if not math.isfinite(grad_norm) or grad_norm > limit:
            self._engine.zero_grad()
            return grad_norm, True
        coefficient = clip_coefficient(grad_norm, self._clip_grad_norm)
        if coefficient != 1.0:
            torch._foreach_mul_(list(gradients.values()), coefficient)
        self._engine.step()
        return grad_norm, False


class _ExternalLossScaler:
    """DeepSpeed's loss-scaler interface with a scale that only the engine changes.

    DeepSpeed increases the scale before it divides the gradients by it, which halves the update
    and at stage 3 also the reported norm.

    Args:
        loss_scale: the scale.
        device: of the losses.
    """

    dynamic = True

    def __init__(self, loss_scale: DynamicLossScale, device: torch.device) -> None:
        self._loss_scale = loss_scale
        # So that no number of the backward pass depends on the step
        self._on_device = torch.zeros((), device=device)
        self._copied = 0.0

    @property
    def cur_scale(self) -> float:
        """The scale of this step."""
        return self._loss_scale.scale

    loss_scale = cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the scaled loss."""
        scale = self._loss_scale.scale
        if scale != self._copied:
            self._on_device.fill_(scale)
            self._copied = scale
        return loss * self._on_device

    def update_scale(self, overflow: bool) -> None:
        """Do nothing; the engine updates the scale after the step."""

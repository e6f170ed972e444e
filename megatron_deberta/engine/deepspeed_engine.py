"""DeepSpeed behind the engine protocol: ZeRO 0 to 3 in fp32, 1 to 3 in bf16 and fp16.

Owns the traps of DeepSpeed's step (docs/engine.md lists them). Refuses DeepSpeed's own
checkpoints, schedules, data loaders and printing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.deepspeed_config import deepspeed_config
from megatron_deberta.engine.deepspeed_runtime import (
    ModelParallelUnit,
    NormLimit,
    deepspeed_environment,
    end_single_process,
    environment_variables,
    import_deepspeed,
    local_rank_variable,
    reducing_while_backward_runs,
    start_single_process,
)
from megatron_deberta.engine.deepspeed_state import ShardedState
from megatron_deberta.engine.grad_norm import clip_coefficient, global_grad_norm
from megatron_deberta.engine.loss_scale import DynamicLossScale
from megatron_deberta.engine.optimizer import (
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


class DeepSpeedZeroEngine:
    """See :class:`~megatron_deberta.engine.protocol.Engine`.

    The number of micro batches between two steps is the run's, because DeepSpeed must know the
    last one before its backward.

    Raises:
        ConfigError: stage 0 with a 16-bit format.
    """

    def __init__(
        self, config: RunConfig, module: nn.Module, specs: Placements, groups: ProcessGroups
    ) -> None:
        settings = deepspeed_config(config, groups.dp_size)
        self._module = module
        self._groups = groups
        self._stage: int = config.precision.zero_stage
        self._clip_grad_norm = config.optimizer.clip_grad_norm
        self._micro_batches: int = settings["gradient_accumulation_steps"]
        self._accumulated = 0
        self._trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        for name, parameter in self._trainable.items():
            if specs[name].dim is not None:
                # DeepSpeed leaves unmarked parameters of the other ranks out of the norm.
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        optimizer = build_optimizer(
            parameter_groups(self._trainable.items(), config.optimizer.weight_decay),
            config.optimizer,
            # apex counts steps by group, but stage 3 steps once for each part of a group.
            allow_apex=groups.device.type == "cuda"
            and self._stage < 3
            and not config.precision.offload_optimizer,
        )
        with ExitStack() as stack:
            deepspeed = import_deepspeed(groups.device)
            start_single_process(groups)
            stack.callback(end_single_process, groups)
            stack.enter_context(environment_variables(local_rank_variable(groups)))
            with deepspeed_environment(groups), reducing_while_backward_runs(groups):
                self._engine: Any = deepspeed.initialize(
                    model=module,
                    optimizer=optimizer,
                    config=settings,
                    mpu=ModelParallelUnit(groups),
                )[0]
            self._process_state = stack.pop_all()
        self._loss_scale = DynamicLossScale(config.precision)
        if self._loss_scale.dynamic:
            self._engine.optimizer.loss_scaler = _HeldLossScaler(self._loss_scale)
        self._state = ShardedState(self._engine)

    @property
    def module(self) -> nn.Module:
        """The model as it was given, with DeepSpeed's hooks on it."""
        return self._module

    def backward(self, loss: Tensor) -> None:
        """Backpropagate one micro batch; the last one of a step reduces over ranks.

        Raises:
            RuntimeError: more micro batches than the run's accumulation steps.
        """
        if self._accumulated == self._micro_batches:
            raise RuntimeError(f"backward: step() is due after {self._micro_batches} losses")
        self._accumulated += 1
        # DeepSpeedEngine.forward would do these two; here the model is called directly.
        if self._stage:
            self._engine.optimizer.clear_backward_seen_flag()
        loss.register_hook(lambda _: self._engine._backward_prologue())
        self._engine.set_gradient_accumulation_boundary(self._accumulated == self._micro_batches)
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, learning_rate: float, norm_limit: float = math.inf) -> StepOutcome:
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
        for group in self._engine.basic_optimizer.param_groups:
            group["lr"] = learning_rate
        scale = self._loss_scale.scale
        if self._stage:
            with NormLimit(self._engine.optimizer, norm_limit * scale) as seen:
                self._engine.step()
            grad_norm = seen.norm / scale
            skipped = bool(self._engine.optimizer.overflow)
        else:
            grad_norm, skipped = self._step_unsharded(norm_limit)
        # Only now: gradients must be divided by the scale that their loss was multiplied by.
        self._loss_scale.update(overflow=math.isinf(grad_norm))
        return StepOutcome(grad_norm, skipped, scale)

    def gather_states(self) -> Iterator[tuple[str, ParameterState]]:
        """Assemble one parameter at a time from the data-parallel ranks that hold its parts."""
        for name, parameter in self._trainable.items():
            yield name, self._state.gather(parameter)

    def load_states(self, fetch: FetchState) -> None:
        """Set master weights and moments, then the working weights of all ranks."""
        for name, parameter in self._trainable.items():
            self._state.scatter(parameter, fetch(name))
        self._state.publish()
        set_adam_step(self._engine.basic_optimizer, self._state.masters, 0)

    def state_dict(self) -> dict[str, int | float]:
        """Adam's step count, the loss scale and its counters."""
        steps = adam_step(self._engine.basic_optimizer, self._state.masters)
        return {"adam_step": steps, **self._loss_scale.state_dict()}

    def load_state_dict(self, scalars: Mapping[str, int | float]) -> None:
        """Set what :meth:`state_dict` gave."""
        steps = int(scalars["adam_step"])
        set_adam_step(self._engine.basic_optimizer, self._state.masters, steps)
        self._loss_scale.load_state_dict(scalars)

    def destroy(self) -> None:
        """Remove DeepSpeed's hooks; restore process groups and environment variables."""
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()
        self._engine.destroy()
        self._process_state.close()

    def _step_unsharded(self, norm_limit: float) -> tuple[float, bool]:
        """Stage 0: clip by our own norm, as DeepSpeed would not tell its. Norm, and if skipped."""
        gradients = {name: p.grad for name, p in self._trainable.items() if p.grad is not None}
        grad_norm = global_grad_norm(
            (
                (gradient, hasattr(self._trainable[name], "tensor_model_parallel"))
                for name, gradient in gradients.items()
            ),
            self._groups,
        )
        if not math.isfinite(grad_norm) or grad_norm > norm_limit:
            self._engine.zero_grad()
            return grad_norm, True
        coefficient = clip_coefficient(grad_norm, self._clip_grad_norm)
        if coefficient != 1.0:
            torch._foreach_mul_(list(gradients.values()), coefficient)
        self._engine.step()
        return grad_norm, False


class _HeldLossScaler:
    """DeepSpeed's loss scaler, held still during its step.

    DeepSpeed lets the scale grow before it divides the gradients by it, which halves the update,
    and at stage 3 the reported norm. Here the scale moves after the step, by ``loss_scale``'s
    rules.
    """

    dynamic = True

    def __init__(self, loss_scale: DynamicLossScale) -> None:
        self._loss_scale = loss_scale

    @property
    def cur_scale(self) -> float:
        """The scale of this step."""
        return self._loss_scale.scale

    loss_scale = cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to backpropagate."""
        return loss * self._loss_scale.scale

    def update_scale(self, overflow: bool) -> None:
        """Ignored; the engine moves the scale when the step is over."""

"""DeepSpeed engine: ZeRO 0 to 3 in fp32, ZeRO 1 to 3 in bf16 and fp16.

``deepspeed_patches.py`` has what is changed in DeepSpeed; docs/engine.md lists all workarounds.
DeepSpeed's checkpoints, schedules, data loaders and printing are not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.config.rules import batch_arithmetic, check_stage
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
from megatron_deberta.engine.deepspeed_patches import (
    ExternalLossScaler,
    NormReading,
    add_gradients_directly,
    deepspeed_environment,
    end_single_process,
    environment_variables,
    import_deepspeed,
    leaner_step,
    local_rank_variable,
    model_parallel_unit,
    overlapped_reduction,
    start_single_process,
)
from megatron_deberta.engine.optimizer import (
    build_optimizer,
    clip_coefficient,
    global_grad_norm,
    parameter_groups,
    set_learning_rate,
)
from megatron_deberta.engine.schedule import HYSTERESIS

# Bucket of gradients that are reduced together: 200 MB in fp32, allocated twice for overlap
REDUCE_BUCKET_ELEMENTS = 50_000_000

# ZeRO-3: parameters with fewer elements are not partitioned
PERSISTENCE_THRESHOLD = 100_000

# ZeRO-3: limit on gathered weights, and the reuse distance below which weights stay gathered
LIVE_ELEMENTS = 1_000_000_000

# Attributes in which DeepSpeed's ZeRO optimizers keep their partitions of the master weights
_MASTERS = (
    "fp32_partitioned_groups_flat",  # stage 3
    "single_partition_of_fp32_groups",  # stages 1 and 2
    "fp32_groups_flat_partition",  # stage 1 in bf16 on one data-parallel rank
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
        self._stage: int = config.parallel.zero_stage
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
            and not config.parallel.offload_optimizer,
            offloads=config.parallel.offload_optimizer,
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
            scaler = ExternalLossScaler(self._loss_scale, groups.device)
            self._engine.optimizer.loss_scaler = scaler
        self._masters = self._find_masters()
        self._create_state()
        if self._stage in (1, 2):
            # Links parameters to their moments, which these stages do only once.
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

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

    def local_shards(self) -> Iterator[LocalShard]:
        """Yield this rank's partitions; at stage 0 every rank holds whole states."""
        for name, parameter in self.module.named_parameters():
            read = self._partition if name in self._trainable else self._frozen
            yield LocalShard(name, *read(parameter))

    def _frozen(self, parameter: Any) -> tuple[int, tuple[Tensor, ...]]:
        """Return the start and the weight of this rank's shard of a frozen parameter."""
        if self._stage < 3:
            return 0, (parameter.detach().view(-1),)
        start, held = self._range(parameter, parameter.ds_tensor)
        return start, (held,)

    def _range(self, parameter: Any, padded: Tensor) -> tuple[int, Tensor]:
        """Return the start of this rank's partition at stage 3, and it without padding."""
        start = dist.get_rank(parameter.ds_process_group) * parameter.ds_tensor.numel()
        # The last partitions are padded.
        return start, padded.detach()[: max(0, min(len(padded), parameter.ds_numel - start))]

    def _partition(self, parameter: Any) -> tuple[int, tuple[Tensor, ...]]:
        """Return the start and the tensors of this rank's shard of a parameter's state."""
        keys = (None, *self._state_keys)
        if not self._stage:
            state = self._adam.state[parameter]
            whole = (parameter if key is None else state[key] for key in keys)
            return 0, tuple(tensor.detach().view(-1) for tensor in whole)
        if self._stage == 3:
            read = self._engine.optimizer._get_fp32_opt_state_partition
            ranges = [self._range(parameter, read(parameter, True, key)[0]) for key in keys]
            return ranges[0][0], tuple(held for _, held in ranges)
        mapping = parameter._hp_mapping
        if mapping is None:
            return 0, (torch.empty(0),) * len(keys)
        tensors = tuple(mapping.get_hp_fragment(key).detach().view(-1) for key in keys)
        return mapping.lp_fragment_address.start, tensors

    def _publish_weights(self) -> None:
        if not self._stage:
            return
        zero = self._engine.optimizer
        if self._stage < 3:
            zero.update_lp_params()
            return
        # As after the update of a step; nothing else writes the partitioned working weights.
        zero._partition_all_parameters()
        for index in range(len(self._masters)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _find_masters(self) -> list[Tensor]:
        zero = self._engine.optimizer
        if not self._stage:
            return [p for group in self._adam.param_groups for p in group["params"]]
        for attribute in _MASTERS:
            if hasattr(zero, attribute):
                return list(getattr(zero, attribute))
        raise TypeError(f"unknown DeepSpeed optimizer {type(zero).__name__}")

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


def zero3_partition(module: nn.Module, groups: ProcessGroups, config: RunConfig) -> None:
    """Partition a module's own parameters over data-parallel ranks for ZeRO-3.

    Called for each module after its parameters are filled, so that the whole model never exists on
    one rank. Collective over data-parallel ranks; the values are those of data-parallel rank 0.

    Args:
        module: its own parameters (not its children's) are filled, in ``precision.dtype``; each
            becomes an empty tensor with this rank's partition in ``ds_tensor``.
        groups: process groups.
        config: the run, with ``parallel.zero_stage=3``.
    """
    deepspeed = import_deepspeed(groups.device)
    start_single_process(groups)
    unit = model_parallel_unit(groups)
    own = nn.Module()
    for name, parameter in module.named_parameters(recurse=False):
        own.register_parameter(name, parameter)
    with deepspeed_environment(groups):
        deepspeed.comm.init_distributed(verbose=False)
        deepspeed.zero.Init(
            module=own,
            data_parallel_group=unit.get_data_parallel_group(),
            mpu=unit,
            config_dict_or_path=deepspeed_config(config, groups.dp_size),
            dtype=next(own.parameters()).dtype,
        )


def deepspeed_config(config: RunConfig, dp_size: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration, the same on every rank.

    Gradients are accumulated and reduced in fp32 whatever the weights' format. The engine supplies
    the optimizer, the learning rate and the loss scale.

    Raises:
        ConfigError: stage 0 with a 16-bit format, or ``train.global_batch_size`` is not divisible.
    """
    parallel, precision = config.parallel, config.precision
    check_stage(config)
    zero: dict[str, Any] = {
        "stage": parallel.zero_stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
    }
    if parallel.offload_optimizer and parallel.zero_stage:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if parallel.zero_stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD,
            "stage3_prefetch_bucket_size": REDUCE_BUCKET_ELEMENTS,
            "stage3_max_live_parameters": LIVE_ELEMENTS,
            "stage3_max_reuse_distance": LIVE_ELEMENTS,
            # True would replace torch.nn.functional.linear for the rest of the process.
            "memory_efficient_linear": False,
            "override_module_apply": False,
        }
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": batch_arithmetic(config, dp_size).accumulation_steps,
        "zero_optimization": zero,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        # Stage 0 would not report the norm; the engine clips there.
        "gradient_clipping": (config.optimizer.clip_grad_norm or 0.0)
        if parallel.zero_stage
        else 0.0,
        # UncorrectedAdamW is elementwise, so it is correct on flat partitions.
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own CPU Adam is compiled at run time; torch's fused one needs no compiler.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        # It would synchronise with the device before every micro batch.
        "timers": {"throughput": {"enabled": False}},
    }
    if precision.dtype == "bf16":
        settings["bf16"] = {
            "enabled": True,
            "check_grad_overflow": True,
            # Add to the fp32 sums in backward: bf16 gradients do not exist all together.
            "immediate_grad_update": True,
        }
    if precision.dtype == "fp16":
        settings["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": precision.initial_loss_scale_power,
            "loss_scale_window": precision.loss_scale_window,
            "hysteresis": HYSTERESIS,
            "min_loss_scale": precision.min_loss_scale,
        }
    return settings

"""Master weights and Adam moments of single parameters in DeepSpeed's flat partitions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.engine.base import ParameterState
from megatron_deberta.engine.optimizer import EMA, MOMENTS, set_adam_step

# Attributes in which DeepSpeed's ZeRO optimizers keep their partitions of the master weights
_MASTERS = (
    "fp32_partitioned_groups_flat",  # stage 3
    "single_partition_of_fp32_groups",  # stages 1 and 2
    "fp32_groups_flat_partition",  # stage 1 in bf16 on one data-parallel rank
)


class ShardedState:
    """Read and write the state of a DeepSpeed engine, whatever its ZeRO stage.

    Moments are created as zeros, so that they can be read and written before the first step.

    Args:
        engine: a new ``DeepSpeedEngine``.
        has_average: keep a moving average of the weights, which starts at the weights.
    """

    def __init__(self, engine: Any, *, has_average: bool = False) -> None:
        self._adam: torch.optim.Optimizer = engine.basic_optimizer
        stage: int = engine.zero_optimization_stage()
        self._zero: Any = engine.optimizer if stage else None
        self._stage3 = stage == 3
        self._keys = (*MOMENTS, EMA) if has_average else MOMENTS
        self.masters: list[Tensor] = self._find_masters()
        for master in self.masters:
            for key in MOMENTS:
                self._adam.state[master][key] = torch.zeros_like(master)
            if has_average:
                self._adam.state[master][EMA] = master.detach().clone()
        set_adam_step(self._adam, self.masters, 0)
        if self._zero is not None and not self._stage3:
            # Links parameters to their moments, which these stages do only once.
            self._zero._lazy_init_hp_params_optimizer_state()

    def gather(self, parameter: nn.Parameter) -> ParameterState:
        """Assemble a parameter's state; collective over data-parallel ranks."""
        return ParameterState(*(self._get(parameter, key) for key in (None, *self._keys)))

    def held(self, parameter: Any) -> tuple[int, tuple[Tensor, ...]]:
        """Return this rank's range of a parameter's state; see ``Engine.held_states``."""
        keys = (None, *self._keys)
        if self._zero is None:
            return 0, tuple(self._local(parameter, key).detach().flatten() for key in keys)
        if self._stage3:
            parts = [self._zero._get_fp32_opt_state_partition(parameter, True, k)[0] for k in keys]
            start = dist.get_rank(parameter.ds_process_group) * parameter.ds_tensor.numel()
            # The last partitions are padded.
            length = max(0, min(len(parts[0]), parameter.ds_numel - start))
            return start, tuple(part[:length] for part in parts)
        mapping = parameter._hp_mapping
        if mapping is None:
            return 0, (torch.empty(0),) * len(keys)
        pieces = tuple(mapping.get_hp_fragment(key).detach().flatten() for key in keys)
        return mapping.lp_fragment_address.start, pieces

    @torch.no_grad()
    def scatter(self, parameter: nn.Parameter, state: ParameterState) -> None:
        """Set this rank's partition of a parameter's state; call :meth:`publish` after the last."""
        self._set(parameter, state.weight, None)
        for key in self._keys:
            value: Tensor | None = getattr(state, key)
            self._set(parameter, state.weight if value is None else value, key)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the master weights into the working weights of all ranks. Collective."""
        if self._zero is None:
            return
        if not self._stage3:
            self._zero.update_lp_params()
            return
        # As after the update of a step; nothing else writes the partitioned working weights.
        self._zero._partition_all_parameters()
        for index in range(len(self.masters)):
            self._zero._reassign_or_swap_out_partitioned_parameters(index)
        if self._zero.persistent_parameters:
            self._zero.persistent_parameters[0].all_gather(self._zero.persistent_parameters)

    def _find_masters(self) -> list[Tensor]:
        if self._zero is None:
            return [p for group in self._adam.param_groups for p in group["params"]]
        for attribute in _MASTERS:
            if hasattr(self._zero, attribute):
                return list(getattr(self._zero, attribute))
        raise TypeError(f"unknown DeepSpeed optimizer {type(self._zero).__name__}")

    def _get(self, parameter: Any, key: str | None) -> Tensor:
        if self._zero is None:
            source: Tensor = self._local(parameter, key)
        elif self._stage3:
            source = self._zero.get_full_hp_param(parameter, key)
        else:
            source = parameter.get_full_hp_param(key)
        return source.detach().to("cpu", torch.float32, copy=True)

    def _set(self, parameter: Any, value: Tensor, key: str | None) -> None:
        if self._zero is None:
            self._local(parameter, key).copy_(value)
        elif self._stage3:
            self._zero.set_local_hp_param(_partition(parameter, value), parameter, key)
        else:
            parameter.set_full_hp_param(value, key)

    def _local(self, parameter: Tensor, key: str | None) -> Tensor:
        value: Tensor = parameter if key is None else self._adam.state[parameter][key]
        return value


def _partition(parameter: Any, value: Tensor) -> Tensor:
    """This rank's slice of a flattened value, zero-padded as in ZeRO-3."""
    length = parameter.ds_tensor.numel()
    start = dist.get_rank(parameter.ds_process_group) * length
    partition = torch.zeros(length, dtype=torch.float32)
    part = value.flatten()[start : start + length]
    partition[: part.numel()] = part
    return partition

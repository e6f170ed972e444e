"""Per-parameter state in and out of DeepSpeed's flat partitions, whatever the ZeRO stage.

Owns the knowledge of where each of DeepSpeed's optimizers keeps master weights and moments.
Refuses files: a checkpoint asks for one parameter at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.engine.optimizer import MOMENTS, set_adam_step
from megatron_deberta.engine.protocol import ParameterState


class ShardedState:
    """Master weights and Adam moments of a DeepSpeed engine.

    Moments exist from the start, as zeros, so that reading and writing need no step before them.

    Args:
        engine: a fresh ``DeepSpeedEngine``.
    """

    def __init__(self, engine: Any) -> None:
        self._adam: torch.optim.Optimizer = engine.basic_optimizer
        self._zero: Any = None if engine.zero_optimization_stage() == 0 else engine.optimizer
        self.masters: list[Tensor] = self._find_masters()
        for master in self.masters:
            for key in MOMENTS:
                self._adam.state[master][key] = torch.zeros_like(master)
        set_adam_step(self._adam, self.masters, 0)
        if self._zero is not None and not self._is_stage3():
            # Stages 1 and 2 find a parameter's moments through links that are made only once.
            self._zero._lazy_init_hp_params_optimizer_state()

    def gather(self, parameter: nn.Parameter) -> ParameterState:
        """Assemble a parameter's state; collective over data-parallel ranks."""
        return ParameterState(*(self._full(parameter, key) for key in (None, *MOMENTS)))

    @torch.no_grad()
    def scatter(self, parameter: nn.Parameter, state: ParameterState) -> None:
        """Set the part of a parameter's state that this rank keeps; :meth:`publish` after all."""
        self._set(parameter, state.weight, None)
        for key in MOMENTS:
            self._set(parameter, getattr(state, key), key)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the master weights into the working weights of all ranks. Collective."""
        if self._zero is None:
            return
        if not self._is_stage3():
            self._zero.update_lp_params()
            return
        # What a step does after the update; nothing else reaches the partitioned weights.
        self._zero._partition_all_parameters()
        for index in range(len(self.masters)):
            self._zero._reassign_or_swap_out_partitioned_parameters(index)
        if self._zero.persistent_parameters:
            self._zero.persistent_parameters[0].all_gather(self._zero.persistent_parameters)

    def _find_masters(self) -> list[Tensor]:
        if self._zero is None:
            return [p for group in self._adam.param_groups for p in group["params"]]
        for attribute in (
            "fp32_partitioned_groups_flat",  # stage 3
            "single_partition_of_fp32_groups",  # stages 1 and 2
            "fp32_groups_flat_partition",  # stage 1 in bf16 on one data-parallel rank
        ):
            if hasattr(self._zero, attribute):
                return list(getattr(self._zero, attribute))
        raise TypeError(f"{type(self._zero).__name__} keeps its master weights nowhere we know")

    def _is_stage3(self) -> bool:
        return hasattr(self._zero, "fp32_partitioned_groups_flat")

    def _full(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        if self._zero is None:
            source = parameter if key is None else self._adam.state[parameter][key]
        elif self._is_stage3():
            source = self._zero.get_full_hp_param(parameter, key)
        else:
            source = parameter.get_full_hp_param(key)  # type: ignore[attr-defined]
        return source.detach().to("cpu", torch.float32, copy=True)

    def _set(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        if self._zero is None:
            (parameter if key is None else self._adam.state[parameter][key]).copy_(value)
        elif self._is_stage3():
            self._zero.set_local_hp_param(self._own_slice(parameter, value), parameter, key)
        else:
            parameter.set_full_hp_param(value, key)  # type: ignore[attr-defined]

    def _own_slice(self, parameter: Any, value: Tensor) -> Tensor:
        """This rank's slice of a flattened value, zero-padded as ZeRO-3 pads it."""
        length = parameter.ds_tensor.numel()
        start = dist.get_rank(parameter.ds_process_group) * length
        own = torch.zeros(length, dtype=torch.float32)
        part = value.flatten()[start : start + length]
        own[: part.numel()] = part
        return own

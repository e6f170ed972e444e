"""DeepSpeed as a library: how it is imported, told its ranks, and kept from surprises.

Owns everything DeepSpeed reads from the process: environment, accelerator, process groups. What
is changed for a call is put back after it. Refuses engines and states.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.deepspeed_config import deepspeed_config
from megatron_deberta.errors import ConfigError, TopologyError


class ModelParallelUnit:
    """The rank grid in the words DeepSpeed asks for it.

    It must not have ``initialize_sequence_parallel``: DeepSpeed takes that for its own sequence
    parallelism and then ignores the groups.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups

    def get_data_parallel_group(self) -> ProcessGroup:
        """Ranks that split the batch; the whole (one-process) world where there is no grid."""
        return _group_or_world(self._groups.dp_group)

    def get_data_parallel_rank(self) -> int:
        """Place among them."""
        return self._groups.dp_rank

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return self._groups.dp_size

    def get_model_parallel_group(self) -> ProcessGroup:
        """Ranks that split a layer; the whole (one-process) world where there is no grid."""
        return _group_or_world(self._groups.tp_group)

    def get_model_parallel_rank(self) -> int:
        """Place among them."""
        return self._groups.tp_rank

    def get_model_parallel_world_size(self) -> int:
        """Their number."""
        return self._groups.tp_size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed for a device, quietly and without a compiler.

    Raises:
        ConfigError: DeepSpeed already runs for another kind of device in this process.
    """
    with environment_variables({"DS_ACCELERATOR": device.type}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.ops
    # It logs its warnings to standard output, where they break the console's lines.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls collectives by names that torch has renamed: one warning a call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\..* is deprecated", FutureWarning)
    # Starting its communication would compile a shared-memory operator that training never uses,
    # and fail without ninja.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    started_for = deepspeed.accelerator.get_accelerator().device_name()
    if started_for.split(":")[0] != device.type:
        raise ConfigError(
            f"train.device={device.type} but DeepSpeed already runs for {started_for} in this "
            f"process; start a new process"
        )
    module: ModuleType = deepspeed
    return module


@contextmanager
def environment_variables(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set (or with None unset) environment variables; restore them on exit."""
    before = {name: os.environ.get(name) for name in variables}
    _set_variables(variables)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def local_rank_variable(groups: ProcessGroups) -> dict[str, str | None]:
    """``LOCAL_RANK``, which DeepSpeed reads at start-up and ZeRO-3 also in every forward pass."""
    if groups.device.type == "cuda":
        # DeepSpeed selects its GPU by this variable alone; srun may show a rank only its own GPU.
        return {"LOCAL_RANK": str(groups.device.index)}
    return {"LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}


@contextmanager
def deepspeed_environment(groups: ProcessGroups) -> Iterator[None]:
    """Let DeepSpeed construct its objects: on the right GPU, fp16 allowed on CPU, no output."""
    # DeepSpeed stops if Open MPI's variable differs from LOCAL_RANK.
    variables = {**local_rank_variable(groups), "OMPI_COMM_WORLD_LOCAL_RANK": None}
    with (
        environment_variables(variables),
        _fp16_on_cpu(groups.device),
        redirect_stdout(io.StringIO()),
    ):
        yield


def start_single_process(groups: ProcessGroups) -> None:
    """Start ``torch.distributed`` for a process that is alone; DeepSpeed cannot do without.

    Raises:
        TopologyError: the grid says one process, but ``torch.distributed`` has more.
    """
    if groups.dp_group is not None:
        return
    if not dist.is_initialized():
        backend = "nccl" if groups.device.type == "cuda" else "gloo"
        # A store in memory needs no port, no file and no variable of a launcher.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    elif dist.get_world_size() > 1:
        raise TopologyError(
            f"the engine got a grid of one process, but torch.distributed has "
            f"{dist.get_world_size()}; build the grid with parallel.topology.build_grid"
        )


def end_single_process(groups: ProcessGroups) -> None:
    """Destroy the process group of :func:`start_single_process`."""
    if groups.dp_group is None and dist.is_initialized():
        dist.destroy_process_group()


def zero3_partition(module: nn.Module, groups: ProcessGroups, config: RunConfig) -> None:
    """Spread a module's own parameters, not its children's, over data-parallel ranks, for ZeRO-3.

    Called for each module as soon as it is filled, it keeps the whole model from ever existing on
    one rank. Collective over data-parallel ranks; the values are those of the first of them.

    Args:
        module: its own parameters are filled and in ``precision.dtype``; each becomes an empty
            tensor with a part of the values in ``ds_tensor``. Its children may be on ``meta``.
        groups: the rank grid.
        config: the run, with ``precision.zero_stage=3``.
    """
    deepspeed = import_deepspeed(groups.device)
    start_single_process(groups)
    unit = ModelParallelUnit(groups)
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


class NormLimit:
    """Makes DeepSpeed's step treat a gradient norm above a limit as it treats infinity.

    Its optimizers of stages 1 to 3 all put the norm to one function before they touch a weight,
    and skip the update and drop the gradients if that says no. A context manager, around one step.

    Args:
        optimizer: DeepSpeed's.
        limit: in the units of its norm, that is, times the loss scale.

    Attributes:
        norm: what the step found; inf if it is not finite.
    """

    def __init__(self, optimizer: Any, limit: float) -> None:
        self._module = sys.modules[type(optimizer).__module__]
        self._limit = limit
        self._is_invalid: Callable[[Any], bool] = self._module.is_invalid_grad_norm
        self.norm = math.inf

    def __enter__(self) -> NormLimit:
        """Stand in for the function."""
        self._module.is_invalid_grad_norm = self._judge  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        """Put it back."""
        self._module.is_invalid_grad_norm = self._is_invalid  # type: ignore[attr-defined]

    def _judge(self, norm: Any) -> bool:
        if self._is_invalid(norm):
            return True
        # Clipping asks again for every group; the device shall not be waited for each time.
        if math.isinf(self.norm):
            self.norm = float(norm)
        return self.norm > self._limit


@contextmanager
def reducing_while_backward_runs(groups: ProcessGroups) -> Iterator[None]:
    """Let bf16 at stage 1 be trained by the optimizer of the other formats and of stage 2.

    DeepSpeed would take its ``BF16_Optimizer`` there, which reduces nothing before backward has
    ended, and keeps 16-bit gradients beside their fp32 sums. One data-parallel rank has nothing to
    reduce and keeps it, because it copies gradients less often.
    """
    if groups.dp_size == 1:
        yield
        return
    from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine

    chosen = DeepSpeedEngine._do_optimizer_sanity_check

    def choose(engine: Any, optimizer: Any) -> Any:
        choice = chosen(engine, optimizer)
        return ZERO_OPTIMIZATION if engine.zero_optimization() else choice

    DeepSpeedEngine._do_optimizer_sanity_check = choose
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = chosen


@contextmanager
def _fp16_on_cpu(device: torch.device) -> Iterator[None]:
    """Lift DeepSpeed's refusal of fp16 on CPUs without native fp16: torch computes it rightly."""
    from deepspeed.accelerator import get_accelerator

    if device.type != "cpu":
        yield
        return
    accelerator: Any = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported


def _group_or_world(group: ProcessGroup | None) -> ProcessGroup:
    if group is not None:
        return group
    world: ProcessGroup | None = dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed is not started; DeepSpeed needs it")
    return world

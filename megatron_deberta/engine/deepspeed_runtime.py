"""DeepSpeed's process-wide state: import, environment variables, process groups and patches.

Every change to the process is limited to a call or undone when the engine is destroyed.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from types import ModuleType, SimpleNamespace
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


def model_parallel_unit(groups: ProcessGroups) -> SimpleNamespace:
    """Process groups behind DeepSpeed's ``mpu`` interface.

    It must not have ``initialize_sequence_parallel``: DeepSpeed would enable its own sequence
    parallelism and ignore these groups.
    """
    # DeepSpeed takes None for all ranks.
    own_group = groups.own_group or _default_group()
    dp_group, tp_group = groups.dp_group or own_group, groups.tp_group or own_group
    tensor_parallel = (tp_group, groups.tp_rank, groups.tp_size)
    axes = {
        "data_parallel": (dp_group, groups.dp_rank, groups.dp_size),
        "model_parallel": tensor_parallel,
        "tensor_model_parallel": tensor_parallel,
    }
    unit = SimpleNamespace()
    for axis, values in axes.items():
        for name, value in zip(("group", "rank", "world_size"), values, strict=True):
            setattr(unit, f"get_{axis}_{name}", lambda value=value: value)
    return unit


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed for a device type, without output and without a compiler.

    Raises:
        ConfigError: this process already uses DeepSpeed for another device type.
    """
    with environment_variables({"DS_ACCELERATOR": device.type}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.ops
    # DeepSpeed logs its warnings to standard output, which would break the console's lines.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that torch has renamed, with one warning per call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\..* is deprecated", FutureWarning)
    # Otherwise start-up compiles a shared-memory operator that training never uses (needs ninja).
    # DeepSpeed reads nothing else of this dict, which it makes at first access by running a
    # compiler for every operator.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    _import_muon()
    active = deepspeed.accelerator.get_accelerator().device_name()
    if active.split(":")[0] != device.type:
        raise ConfigError(
            f"train.device={device.type}, but this process already uses DeepSpeed on {active}; "
            "start a new process"
        )
    module: ModuleType = deepspeed
    return module


def _import_muon() -> None:
    """Import DeepSpeed's Muon optimizer, which it imports for type checks, without compiling it.

    Its functions are decorated with ``torch.compile``, which imports the compiler and takes about a
    second. No run uses this optimizer.
    """
    from deepspeed.runtime import compiler

    compile_decorator = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = compile_decorator


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
    # DeepSpeed selects its GPU by this variable alone; srun may show a rank only its own GPU.
    on_gpu = groups.device.type == "cuda"
    given = os.environ.get("LOCAL_RANK") or "0"
    return {"LOCAL_RANK": str(groups.device.index) if on_gpu else given}


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
    """Initialise ``torch.distributed`` in a single process, which DeepSpeed requires.

    Raises:
        TopologyError: ``groups`` is of one process, but ``torch.distributed`` has several.
    """
    if groups.world_size > 1:
        return
    if not dist.is_initialized():
        backend = "nccl" if groups.device.type == "cuda" else "gloo"
        # An in-memory store needs no port, file or launcher variable.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    elif dist.get_world_size() > 1:
        raise TopologyError(
            f"the engine got single-process groups, but torch.distributed has "
            f"{dist.get_world_size()} ranks; build them with distributed.topology.build_grid"
        )


def end_single_process(groups: ProcessGroups) -> None:
    """Destroy the process group of :func:`start_single_process`."""
    if groups.world_size == 1 and dist.is_initialized():
        dist.destroy_process_group()


def zero3_partition(module: nn.Module, groups: ProcessGroups, config: RunConfig) -> None:
    """Partition a module's own parameters over data-parallel ranks for ZeRO-3.

    Called for each module after its parameters are filled, so that the whole model never exists on
    one rank. Collective over data-parallel ranks; the values are those of data-parallel rank 0.

    Args:
        module: its own parameters (not its children's) are filled, in ``precision.dtype``; each
            becomes an empty tensor with this rank's partition in ``ds_tensor``.
        groups: process groups.
        config: the run, with ``precision.zero_stage=3``.
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


def overlapped_reduction(groups: ProcessGroups) -> AbstractContextManager[None]:
    """Use the ZeRO optimizer of the other formats for bf16 at stage 1, too.

    DeepSpeed's choice, ``BF16_Optimizer``, reduces gradients only after backward. With one
    data-parallel rank there is nothing to reduce, and it copies gradients less often.
    """
    if groups.dp_size == 1:
        return nullcontext()
    from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine

    select = DeepSpeedEngine._do_optimizer_sanity_check

    def select_zero(engine: Any, optimizer: Any) -> Any:
        selected = select(engine, optimizer)
        return ZERO_OPTIMIZATION if engine.zero_optimization() else selected

    return patched(DeepSpeedEngine, "_do_optimizer_sanity_check", select_zero)


def add_gradients_directly(optimizer: Any) -> None:
    """Make a ZeRO optimizer add 16-bit gradients to their fp32 sums without an fp32 copy.

    DeepSpeed converts each gradient in every micro batch, writing and reading 4 bytes per element,
    and needs memory for the largest. The sums keep their bits. Stages 2 and 3 sum in their buckets.

    Args:
        optimizer: of ``deepspeed.initialize``; others than that of stage 1 are left as they are.
    """
    if hasattr(optimizer, "immediate_grad_update"):  # BF16_Optimizer

        def add_to_sum(parameter: Any, group: int, index: int, clear_lp_grads: bool) -> None:
            if parameter.grad is None:
                return
            total = optimizer.fp32_groups_gradients[group][index]
            has_sum = optimizer.fp32_groups_has_gradients[group]
            gradient = parameter.grad.detach().view(total.shape)
            if has_sum[index]:
                total.add_(gradient)
            else:
                total.copy_(gradient)
            parameter._hp_grad = total
            has_sum[index] = True
            if clear_lp_grads:
                parameter.grad.zero_()

        optimizer._update_hp_grad = torch.no_grad()(add_to_sum)
    elif getattr(optimizer, "use_grad_accum_attribute", False):  # DeepSpeedZeroOptimizer
        convert = optimizer._fill_param_grad_accum_attribute

        def add_to_attribute(parameter: Any) -> None:
            if parameter.grad is None or parameter.grad_accum is None:
                convert(parameter)
                return
            parameter.grad_accum.add_(parameter.grad.detach().view(parameter.grad_accum.shape))
            parameter.grad = None

        optimizer._fill_param_grad_accum_attribute = torch.no_grad()(add_to_attribute)


def _fp16_on_cpu(device: torch.device) -> AbstractContextManager[None]:
    """Allow fp16 on CPUs without native fp16, which torch computes correctly."""
    if device.type != "cpu":
        return nullcontext()
    from deepspeed.accelerator import get_accelerator

    return patched(get_accelerator(), "is_fp16_supported", lambda: True)


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute, inherited ones included; restore it on exit.

    Args:
        owner: object, class or module.
        name: of the attribute.
        value: of the attribute until the exit.
    """
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _default_group() -> ProcessGroup:
    group: ProcessGroup | None = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed is not initialised")
    return group

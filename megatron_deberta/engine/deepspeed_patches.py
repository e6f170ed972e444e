"""What is changed in DeepSpeed 0.19.8, and in the process around it.

Every change is limited to a call, to an object, or undone when the engine is destroyed. "Upstream"
in a docstring names the issue (#) of deepspeedai/DeepSpeed, or the behaviour, whose end makes the
patch unnecessary. tests/unit/engine/test_deepspeed_patches.py fails when DeepSpeed changes a
function that a patch replaces or relies on.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stdout,
)
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import ReadNorm
from megatron_deberta.engine.optimizer import CLIP_EPSILON
from megatron_deberta.engine.schedule import DynamicLossScale
from megatron_deberta.errors import ConfigError, TopologyError


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


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed for a device type, without output and without a compiler.

    Upstream: start-up on CPU compiles ``deepspeed_shm_comm``, which needs ninja (as in #1687), and
    ``deepspeed.ops`` probes all operators with a compiler.

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

    No run uses this optimizer.

    Upstream: its functions are decorated with ``torch.compile``, which imports the compiler and
    takes about a second.
    """
    from deepspeed.runtime import compiler

    with patched(compiler, "compile", lambda: compiler.dummy_decorator):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


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
    """``LOCAL_RANK``, which DeepSpeed reads at start-up and ZeRO-3 also in every forward pass.

    Upstream: DeepSpeed selects its GPU by this variable and not by the module's device.
    """
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

    Upstream: one process needs a launcher's variables or MPI.

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


def _fp16_on_cpu(device: torch.device) -> AbstractContextManager[None]:
    """Allow fp16 on CPUs without native fp16, which torch computes correctly.

    Upstream: ``deepspeed.initialize`` rejects fp16 there (#5718).
    """
    if device.type != "cpu":
        return nullcontext()
    from deepspeed.accelerator import get_accelerator

    return patched(get_accelerator(), "is_fp16_supported", lambda: True)


def model_parallel_unit(groups: ProcessGroups) -> SimpleNamespace:
    """Process groups behind DeepSpeed's ``mpu`` interface.

    Upstream: DeepSpeed takes groups from an object with these methods. It must not have
    ``initialize_sequence_parallel``: DeepSpeed would enable its own sequence parallelism and
    ignore these groups.
    """
    # DeepSpeed takes None for all ranks.
    own_group = groups.own_group or dist.group.WORLD
    if own_group is None:
        raise RuntimeError("torch.distributed is not initialised")
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


def overlapped_reduction(groups: ProcessGroups) -> AbstractContextManager[None]:
    """Use the ZeRO optimizer of the other formats for bf16 at stage 1, too.

    With one data-parallel rank there is nothing to reduce, and ``BF16_Optimizer`` copies gradients
    less often.

    Upstream: DeepSpeed's choice for bf16 with fp32 sums, ``BF16_Optimizer``, reduces gradients only
    after backward (#2295, #6685; stage 1 of the other formats overlaps since #4887).
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

    The sums keep their bits. Stages 2 and 3 sum in their buckets.

    Upstream: each gradient is converted in every micro batch, which writes and reads 4 bytes per
    element and needs memory for the largest, also with ``immediate_grad_update`` (#4975).

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


class ExternalLossScaler:
    """DeepSpeed's loss-scaler interface with a scale that only the engine changes.

    Upstream: the scale is increased before the gradients are divided by it, which halves the
    update and at stage 3 also the reported norm (#2686; measured in a comment on #8588).

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
        """Return the scaled loss, a scalar like ``loss``."""
        scale = self._loss_scale.scale
        if scale != self._copied:
            self._on_device.fill_(scale)
            self._copied = scale
        return loss * self._on_device

    def update_scale(self, overflow: bool) -> None:
        """Do nothing; the engine updates the scale after the step."""


class NormReading:
    """Reads the gradient norm of a step from the device, once.

    Attributes:
        norm: of the unscaled gradient; inf: not finite; None: not read.

    Args:
        read: see `ReadNorm`.
        scale: loss scale, a power of two.
    """

    def __init__(self, read: ReadNorm, scale: float) -> None:
        self._read, self._scale = read, scale
        self.norm: float | None = None
        self._is_rejected = False

    def rejects(self, scaled_norm: Tensor | float) -> bool:
        """Return whether the step makes no update: the norm is not finite or above the limit.

        DeepSpeed calls this for each parameter group; only the first call reads the norm.

        Args:
            scaled_norm: scalar on the device, 2-norm of the gradient times the loss scale; -1: not
                finite.
        """
        if self.norm is None:
            scaled = torch.as_tensor(scaled_norm).double()
            scaled_norm, limit = self._read(torch.where(scaled < 0, math.inf, scaled))
            # Exact, because the scale is a power of two
            norm = scaled_norm / self._scale
            self.norm = norm if math.isfinite(norm) else math.inf
            self._is_rejected = math.isinf(self.norm) or self.norm > limit
        return self._is_rejected

    def norm_on(self, device: torch.device) -> float:
        """Return the unscaled norm; inf if DeepSpeed found an overflow without it."""
        if self.norm is None:
            self.rejects(torch.full((), math.inf, device=device))
        assert self.norm is not None
        return self.norm

    def divisor(self, max_norm: float | None) -> float:
        """Return the number that unscales the gradient and clips it, if ``max_norm`` is given."""
        assert self.norm is not None
        clip = 1.0 if max_norm is None else max((self.norm + CLIP_EPSILON) / max_norm, 1.0)
        return clip * self._scale


@contextmanager
def leaner_step(
    optimizer: Any, reading: NormReading, groups: ProcessGroups, max_norm: float | None
) -> Iterator[None]:
    """Make one step of ZeRO 1 to 3 read the norm by ``reading``, which decides on the update.

    On CPU the results keep their bits. On a GPU, torch's fused AdamW unscales and clips while it
    reads the gradients.

    Upstream: a step cannot be skipped from outside. It waits for a check of overflows, for the norm
    and for its comparison with the limit of clipping, and computes the norm of each parameter by
    kernels of its own (reduced, not removed, by #4436 and #8331).

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        reading: of this step.
        groups: process groups.
        max_norm: limit of clipping; None: no clipping.
    """
    module, adam = sys.modules[type(optimizer).__module__], optimizer.optimizer
    names = ("cpu_offload", "offload_optimizer")
    offloaded = any(getattr(optimizer, name, False) for name in names)
    with ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patched(owner, name, value))

        patch(module, "is_invalid_grad_norm", reading.rejects)
        if hasattr(optimizer, "check_overflow") and groups.tp_size == 1 and not offloaded:
            # A gradient that is not finite makes the norm so. With tensor parallelism, the norm
            # contains replicated gradients of one rank only.
            patch(optimizer, "check_overflow", lambda *_, **__: None)
        if hasattr(module, "clip_tensors_by_global_norm") and hasattr(optimizer, "bf16_groups"):
            patch(module, "get_global_norm_of_tensors", functools.partial(_global_norm, groups))
            patch(module, "clip_tensors_by_global_norm", functools.partial(_clip, reading))
        elif hasattr(optimizer, "get_grad_norm_direct") and not offloaded:
            # Stages 1 and 2 sum over ranks in fp32, stage 3 in the norm's dtype.
            is_wide = hasattr(optimizer, "_get_norm_groups")
            patch(optimizer, "get_grad_norm_direct", _group_norm_function(groups, is_wide=is_wide))
        if can_fold(adam, groups.device) and not offloaded:

            def fold(*_: Any, **__: Any) -> None:
                # torch's fused AdamW divides the gradients instead of a pass of their own.
                adam.grad_scale = torch.full(
                    (), reading.divisor(max_norm), dtype=torch.float32, device=groups.device
                )

            if hasattr(optimizer, "unscale_and_clip_grads"):
                patch(optimizer, "unscale_and_clip_grads", fold)
            else:
                patch(module, "clip_tensors_by_global_norm", fold)
            stack.callback(setattr, adam, "grad_scale", None)
        yield


def can_fold(adam: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether the optimizer divides gradients. On CPU, results keep their rounding."""
    return device.type != "cpu" and isinstance(adam, torch.optim.AdamW)


def _squares(tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of squares in few kernels, a scalar of ``dtype``."""
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors], 2, dtype=dtype)
    return torch.stack(norms).pow(2).sum()


def _global_norm(groups: ProcessGroups, input_tensors: Sequence[Tensor], **_: Any) -> Tensor:
    """Compute ``get_global_norm_of_tensors`` of DeepSpeed's ``BF16_Optimizer``."""
    total = _squares(input_tensors, torch.float32)
    if groups.tp_group is not None:
        dist.all_reduce(total, group=groups.tp_group)
    return total.pow(0.5)


def _clip(reading: NormReading, input_tensors: Sequence[Tensor], max_norm: float, **_: Any) -> None:
    """Do what ``clip_tensors_by_global_norm`` does, with the norm that was read."""
    # As DeepSpeed computes it, in fp32.
    inverse = np.float32(1) / (np.float32(reading.norm) + np.float32(CLIP_EPSILON))
    coefficient = float(inverse * np.float32(max_norm))
    if coefficient < 1:
        torch._foreach_mul_([tensor.detach() for tensor in input_tensors], coefficient)


def _group_norm_function(groups: ProcessGroups, *, is_wide: bool) -> Callable[..., Tensor]:
    """Return the equivalent of ``get_grad_norm_direct`` of ZeRO 1 to 3.

    Args:
        groups: process groups.
        is_wide: sum over ranks in DeepSpeed's dtype of norms (fp64 where there is one).
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter
    from deepspeed.runtime.zero.utils import get_norm_dtype

    def norm_of(gradients: Iterable[Tensor], params: Iterable[Tensor]) -> Tensor:
        real = (g for g in gradients if not getattr(g, "_zero_padding", False))
        own = [
            gradient
            for gradient, parameter in zip(real, params, strict=False)
            if is_model_parallel_parameter(parameter) or groups.tp_rank == 0
        ]
        dtype = get_norm_dtype()
        total = torch.zeros((), dtype=dtype, device=groups.device)
        if own:
            total = _squares(own, dtype)
        if not is_wide:
            total = total.float()
        for group in (groups.dp_group, groups.tp_group):
            if group is not None:
                dist.all_reduce(total, group=group)
        return total.pow(0.5)

    return norm_of

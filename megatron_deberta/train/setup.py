"""Set-up of a training process: device, determinism, model and throughput meter."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import psutil
import torch

from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.saver import FREE_SHARE, copy_bytes, state_bytes
from megatron_deberta.checkpoint.store import find_newest, find_newest_checkpoint
from megatron_deberta.config import config_from_dict
from megatron_deberta.config.precision import PREFERRED, formats_of, resolve_precision
from megatron_deberta.config.schema import DType, EngineName, RunConfig
from megatron_deberta.distributed.control import (
    all_reduce_any,
    all_reduce_max,
    broadcast_text,
    raise_on_all_ranks,
)
from megatron_deberta.distributed.environment import RankEnvironment, read_environment
from megatron_deberta.distributed.parallelize.build import ShardedModel, build_model
from megatron_deberta.distributed.parallelize.plan import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups, flush_denormal_numbers
from megatron_deberta.model.low_rank import is_trained
from megatron_deberta.observe.throughput import StepWork, ThroughputMeter, measure_matmul_rate

# Values of ``precision.dtype`` as torch dtypes; ``auto`` that nothing has resolved is fp32.
DTYPES = {
    "auto": torch.float32,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

logger = logging.getLogger(__name__)


def choose_precision(config: RunConfig, groups: ProcessGroups) -> RunConfig:
    """Replace ``auto`` of ``precision.dtype`` and ``parallel.engine``. Collective over all ranks.

    Raises:
        ConfigError: the run in the folder began in a format that a device lacks.
    """
    if "auto" not in (config.precision.dtype, config.parallel.engine):
        return config
    device = groups.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    formats = formats_of(capability)
    if capability is not None:
        # Devices may differ: what all of them have.
        first = all_reduce_max(torch.tensor(PREFERRED.index(formats[0]), device=device), groups)
        formats = PREFERRED[int(first.item()) :]
    resolved = resolve_precision(
        config, formats,
        is_cpu_process=groups.world_size == 1 and device.type == "cpu",
        resumed=_began_with(config, groups),
    )  # fmt: skip
    for key, given, value in (
        ("precision.dtype", config.precision.dtype, resolved.precision.dtype),
        ("parallel.engine", config.parallel.engine, resolved.parallel.engine),
    ):
        if given == "auto":
            logger.info("%s: auto is %s on these devices", key, value)
    return resolved


def _began_with(config: RunConfig, groups: ProcessGroups) -> tuple[DType, EngineName] | None:
    """Return format and engine of the checkpoint that a run resumes or continues. Collective.

    None: it begins.
    """
    text = ""
    with raise_on_all_ranks(groups):
        newest = find_newest(config.train.run_dir)
        if newest is None and (given := config.checkpoint.continue_from):
            newest = find_newest_checkpoint(Path(given))
        if groups.rank == 0 and newest is not None:
            saved = config_from_dict(CheckpointReader(newest).metadata.config, str(newest))
            text = f"{saved.precision.dtype} {saved.parallel.engine}"
    text = broadcast_text(text, groups)
    if not text:
        return None
    # What a program has saved without resolving it was fp32 and DeepSpeed.
    dtype, engine = text.split()
    return (
        "fp32" if dtype == "auto" else cast(DType, dtype),
        "deepspeed" if engine == "auto" else cast(EngineName, engine),
    )


def set_determinism(device: torch.device, environment: RankEnvironment) -> None:
    """Set deterministic algorithms, precision of fp32, CUDA's allocator, threads on CPU.

    Call it before CUDA starts and before torch starts threads. On CPU, a nondeterministic operator
    is an error (tested: runs, resumes and kills repeat bit for bit), and denormal numbers become
    zero. On CUDA it is a warning, because the set of such operators depends on the versions of
    torch and cuBLAS; bitwise repetition is not tested there.
    """
    on_gpu = device.type == "cuda"
    # As torch.use_deterministic_algorithms, without importing the compiler, which takes seconds;
    # ``model.fused.compiled`` sets the compiler's mode.
    torch.set_deterministic_debug_mode("warn" if on_gpu else "error")
    # Filling every new tensor is for debugging reads of uninitialized memory; it costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # fp32 is fp32: cuDNN's convolutions would use TF32 by default.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if on_gpu:
        # Activations differ in size from step to step (short rows, validation); without it the
        # memory of one size is not reused for another.
        if "PYTORCH_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        # cuBLAS reads this at start-up; without it the order of its sums is not fixed.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        return
    if not os.environ.get("OMP_NUM_THREADS"):
        # Every rank would use all cores.
        torch.set_num_threads(max(1, torch.get_num_threads() // environment.local_world_size))
    flush_denormal_numbers()


def build_rank_model(config: RunConfig, groups: ProcessGroups) -> ShardedModel:
    """Build this rank's shard of the initialized model in ``precision.dtype``.

    Parameters are partitioned over data-parallel ranks under ZeRO-3.
    """
    partition = None
    if config.parallel.engine != "plain" and config.parallel.zero_stage == 3:
        # Imported here because importing DeepSpeed is slow and reads the environment.
        from megatron_deberta.engine.deepspeed_engine import zero3_partition

        partition = functools.partial(zero3_partition, groups=groups, config=config)
    model = build_model(config, groups, DTYPES[config.precision.dtype], partition=partition)
    rank = config.finetune.lora_rank
    if rank is not None:
        sizes = {name: math.prod(spec.logical_shape) for name, spec in model.specs.items()}
        trained = sum(size for name, size in sizes.items() if is_trained(name, rank))
        logger.info(
            "finetune.lora_rank=%d: %s of %s parameters are trained",
            rank, f"{trained:,}", f"{sum(sizes.values()):,}",
        )  # fmt: skip
    return model


def choose_background_saves(
    config: RunConfig, groups: ProcessGroups, specs: Mapping[str, ParameterSpec]
) -> tuple[bool, str]:
    """Return whether scheduled checkpoints are written in the background, and why. Collective.

    Args:
        config: the run.
        groups: the rank grid.
        specs: this rank's part of every parameter.
    """
    mode, local = config.checkpoint.asynchronous, config.checkpoint.local_every is not None
    size = sum(math.prod(spec.local_shape) for spec in specs.values())
    size *= state_bytes(config.optimizer.ema_decay)
    copy = copy_bytes(size, groups.dp_size, config.parallel.zero_stage)
    copy *= read_environment().local_world_size
    free = psutil.virtual_memory().available
    fits = (1 + local) * copy <= FREE_SHARE * free
    is_chosen = mode is True or (mode == "auto" and not all_reduce_any(not fits, groups))
    what = "in the background" if is_chosen else "while training waits"
    memory = f"a copy takes {copy / 2**30:.3g} GiB of a node, {free / 2**30:.3g} GiB are free"
    return is_chosen, f"{what} (checkpoint.asynchronous={str(mode).lower()}; {memory})"


def build_meter(config: RunConfig, groups: ProcessGroups, work: StepWork) -> ThroughputMeter:
    """Build the throughput meter; measures the matrix multiplication rate of this device.

    Args:
        config: the run.
        groups: the rank grid.
        work: of a step.
    """
    dtype = DTYPES[config.precision.dtype]

    def measure() -> float:
        return measure_matmul_rate(groups.device, dtype) * groups.world_size

    return ThroughputMeter(work=work, matmul_rate=measure(), measure=measure)

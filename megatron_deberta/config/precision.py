"""Resolution of ``precision.dtype: auto`` and ``parallel.engine: auto`` for given devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_deberta.config.schema import DType, EngineName, RunConfig
from megatron_deberta.errors import ConfigError

PREFERRED: tuple[DType, ...] = ("bf16", "fp16", "fp32")
"""Number formats in the order in which ``auto`` chooses among those that a GPU supports."""
CPU_FORMATS: tuple[DType, ...] = ("fp32", "bf16", "fp16")
"""Formats of a CPU, of which ``auto`` is the first."""


def formats_of(capability: tuple[int, int] | None) -> tuple[DType, ...]:
    """Return the number formats of a device; ``auto`` is the first.

    Args:
        capability: CUDA's compute capability; None: a CPU.
    """
    if capability is None:
        return CPU_FORMATS
    # Matrix units: none before V100 (7.0), bf16 since A100 (8.0).
    return PREFERRED[0 if capability >= (8, 0) else 1 if capability >= (7, 0) else 2 :]


def resolve_precision(
    config: RunConfig,
    formats: Sequence[DType],
    *,
    is_cpu_process: bool,
    resumed: tuple[DType, EngineName] | None = None,
) -> RunConfig:
    """Replace ``auto`` by a number format and an engine.

    A run keeps the format in which it began, on whatever it resumes, and DeepSpeed's engine, so
    that a resumed run is bit-identical.

    Args:
        config: the run.
        formats: number formats of the devices; the first is chosen.
        is_cpu_process: the run is one process on a CPU, for which the plain engine is faster.
        resumed: format and engine of the checkpoint from which the run resumes; None: it begins.

    Raises:
        ConfigError: the devices lack the format of the checkpoint.
    """
    parallel = config.parallel
    engine, dtype = parallel.engine, config.precision.dtype
    if engine == "auto":
        is_plain = is_cpu_process and not parallel.offload_optimizer
        began_with_deepspeed = resumed is not None and resumed[1] == "deepspeed"
        engine = "plain" if is_plain and not began_with_deepspeed else "deepspeed"
    if dtype == "auto" and resumed is not None:
        dtype = resumed[0]
        if dtype not in formats:
            raise ConfigError(
                f"precision.dtype=auto: the run that train.run_dir={config.train.run_dir} resumes "
                f"began in {dtype}, which these devices lack; resume it on others, or set "
                f"precision.dtype={formats[0]} and pass --allow-config-change"
            )
    elif dtype == "auto":
        # 16-bit formats need a stage above 0 in DeepSpeed; see ``rules.check_stage``.
        is_unsharded = engine == "deepspeed" and parallel.zero_stage == 0
        dtype = "fp32" if is_unsharded else formats[0]
    return replace(
        config,
        parallel=replace(parallel, engine=engine),
        precision=replace(config.precision, dtype=dtype),
    )

"""``auto`` of ``precision.dtype`` and ``parallel.engine``."""

from __future__ import annotations

from typing import Literal

import pytest

from megatron_deberta.config import RunConfig
from megatron_deberta.config.precision import (
    CPU_FORMATS,
    PREFERRED,
    formats_of,
    resolve_precision,
)
from megatron_deberta.config.schema import DType, EngineName, ParallelConfig, PrecisionConfig
from megatron_deberta.errors import ConfigError


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        (None, ("fp32", "bf16", "fp16")),
        ((6, 1), ("fp32",)),
        ((7, 0), ("fp16", "fp32")),
        ((7, 5), ("fp16", "fp32")),
        ((8, 0), ("bf16", "fp16", "fp32")),
        ((9, 0), ("bf16", "fp16", "fp32")),
    ],
)
def test_formats_of_devices(
    capability: tuple[int, int] | None, expected: tuple[DType, ...]
) -> None:
    assert formats_of(capability) == expected


def resolved(
    parallel: ParallelConfig,
    formats: tuple[DType, ...],
    *,
    dtype: DType | Literal["auto"] = "auto",
    is_cpu_process: bool = False,
    resumed: tuple[DType, EngineName] | None = None,
) -> tuple[str, str]:
    """Return format and engine."""
    config = RunConfig(parallel=parallel, precision=PrecisionConfig(dtype=dtype))
    found = resolve_precision(config, formats, is_cpu_process=is_cpu_process, resumed=resumed)
    return found.precision.dtype, found.parallel.engine


def test_a_new_run_takes_what_the_devices_have() -> None:
    auto = ParallelConfig()
    assert (PrecisionConfig().dtype, auto.engine) == ("auto", "auto")
    assert resolved(auto, PREFERRED) == ("bf16", "deepspeed")
    assert resolved(auto, formats_of((7, 0))) == ("fp16", "deepspeed")
    assert resolved(auto, CPU_FORMATS) == ("fp32", "deepspeed")
    assert resolved(auto, CPU_FORMATS, is_cpu_process=True) == ("fp32", "plain")
    # DeepSpeed's stage 0 has fp32 only, and only DeepSpeed offloads.
    assert resolved(ParallelConfig(zero_stage=0), PREFERRED) == ("fp32", "deepspeed")
    assert resolved(ParallelConfig(zero_stage=0, engine="plain"), PREFERRED) == ("bf16", "plain")
    offload = ParallelConfig(offload_optimizer=True)
    assert resolved(offload, CPU_FORMATS, is_cpu_process=True) == ("fp32", "deepspeed")


def test_what_is_set_stays() -> None:
    given = ParallelConfig(engine="deepspeed")
    resumed: tuple[DType, EngineName] = ("bf16", "plain")
    for is_cpu_process in (False, True):
        found = resolved(
            given, CPU_FORMATS, dtype="fp16", is_cpu_process=is_cpu_process, resumed=resumed
        )
        assert found == ("fp16", "deepspeed")


def test_a_resumed_run_keeps_its_format_and_deepspeed() -> None:
    auto = ParallelConfig()
    began_on_cpu: tuple[DType, EngineName] = ("fp32", "plain")
    assert resolved(auto, PREFERRED, resumed=began_on_cpu) == ("fp32", "deepspeed")
    assert resolved(auto, CPU_FORMATS, is_cpu_process=True, resumed=began_on_cpu) == began_on_cpu
    began_on_gpu: tuple[DType, EngineName] = ("bf16", "deepspeed")
    assert resolved(auto, CPU_FORMATS, is_cpu_process=True, resumed=began_on_gpu) == began_on_gpu
    with pytest.raises(ConfigError, match="began in bf16, which these devices lack.*dtype=fp16"):
        resolved(auto, formats_of((7, 0)), resumed=began_on_gpu)

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_deberta.config.schema import PrecisionConfig, RunConfig, TrainConfig
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.deepspeed_engine import deepspeed_config
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.errors import ConfigError

TRAIN = TrainConfig(global_batch_size=48, micro_batch_size=4)


def _settings(**precision: Any) -> dict[str, Any]:
    return deepspeed_config(RunConfig(precision=PrecisionConfig(**precision), train=TRAIN), 3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_stage_0_in_16_bits_is_refused_by_name(dtype: Any) -> None:
    config = RunConfig(precision=PrecisionConfig(dtype=dtype, zero_stage=0), train=TRAIN)
    match = f"precision.zero_stage=0.*precision.dtype={dtype}.*precision.zero_stage=1"
    with pytest.raises(ConfigError, match=match):
        deepspeed_config(config, 1)
    groups = single_process_groups(torch.device("cpu"))
    with pytest.raises(ConfigError, match=match):
        build_engine(config, torch.nn.Linear(1, 1), {}, groups)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_gradients_are_accumulated_and_reduced_in_fp32(dtype: str, stage: int) -> None:
    settings = _settings(dtype=dtype, zero_stage=stage)
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
    assert settings["communication_data_type"] == "fp32"
    assert settings["zero_optimization"]["stage"] == stage
    assert settings["gradient_accumulation_steps"] == 4
    assert ("bf16" in settings, "fp16" in settings) == (dtype == "bf16", dtype == "fp16")


def test_it_is_json_and_changes_nothing() -> None:
    config = RunConfig(train=TRAIN)
    before = replace(config)
    assert json.loads(json.dumps(deepspeed_config(config, 3))) == deepspeed_config(config, 3)
    assert config == before


def test_stage_3_leaves_torch_alone() -> None:
    zero = _settings(zero_stage=3)["zero_optimization"]
    assert zero["memory_efficient_linear"] is False
    assert zero["override_module_apply"] is False


def test_offload_is_passed_on() -> None:
    zero = _settings(zero_stage=2, offload_optimizer=True)["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert "offload_optimizer" not in _settings(zero_stage=2)["zero_optimization"]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    config = RunConfig(train=TrainConfig(global_batch_size=10, micro_batch_size=4))
    with pytest.raises(ConfigError, match="train.global_batch_size=10"):
        deepspeed_config(config, 3)

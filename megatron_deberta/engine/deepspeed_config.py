"""The DeepSpeed dictionary of a run: a pure function, never a hand-written file.

Owns every DeepSpeed setting we use and why. Refuses what DeepSpeed computes wrongly.
"""

from __future__ import annotations

from typing import Any

from megatron_deberta.config.rules import batch_arithmetic, check_stage
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.engine.loss_scale import HYSTERESIS

REDUCE_BUCKET_ELEMENTS = 50_000_000
"""Gradients reduced together; larger parameters go alone. 200 MB in fp32, twice with overlap."""

PERSISTENCE_THRESHOLD = 100_000
"""ZeRO-3: parameters with fewer elements stay whole, as gathering them costs more than it saves."""

LIVE_ELEMENTS = 1_000_000_000
"""ZeRO-3: weights that may be gathered at a time; those used again sooner than that stay."""


def deepspeed_config(config: RunConfig, dp_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration for one rank of a run.

    Gradients are accumulated and reduced in fp32 whatever the weights' format. Optimizer, learning
    rate and loss scale are ours: DeepSpeed gets an optimizer object, a rate at each step, and a
    scaler whose rules are in ``loss_scale``.

    Args:
        config: the run.
        dp_size: data-parallel ranks.

    Returns:
        A dictionary of JSON types, the same on every rank.

    Raises:
        ConfigError: stage 0 with a 16-bit format, or a batch that does not divide.
    """
    precision = config.precision
    check_stage(precision)
    arithmetic = batch_arithmetic(config, dp_size)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": arithmetic.accumulation_steps,
        "zero_optimization": _zero(config),
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        # Stage 0 would clip without telling the norm; the engine clips there itself.
        "gradient_clipping": config.optimizer.clip_grad_norm if precision.zero_stage else 0.0,
        # UncorrectedAdamW is elementwise, so it is right on flat partitions.
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own CPU Adam is compiled at run time; torch's fused one needs no compiler.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if precision.dtype == "bf16":
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
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


def _zero(config: RunConfig) -> dict[str, Any]:
    precision = config.precision
    zero: dict[str, Any] = {
        "stage": precision.zero_stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
    }
    if precision.offload_optimizer and precision.zero_stage:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if precision.zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = PERSISTENCE_THRESHOLD
        zero["stage3_prefetch_bucket_size"] = REDUCE_BUCKET_ELEMENTS
        zero["stage3_max_live_parameters"] = LIVE_ELEMENTS
        zero["stage3_max_reuse_distance"] = LIVE_ELEMENTS
        # Replaces torch.nn.functional.linear for the whole process, for good.
        zero["memory_efficient_linear"] = False
        zero["override_module_apply"] = False
    return zero

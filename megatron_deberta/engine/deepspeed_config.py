"""DeepSpeed configuration of a run, as a pure function of ``RunConfig``."""

from __future__ import annotations

from typing import Any

from megatron_deberta.config.rules import batch_arithmetic, check_stage
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.engine.loss_scale import HYSTERESIS

# Bucket of gradients that are reduced together: 200 MB in fp32, allocated twice for overlap
REDUCE_BUCKET_ELEMENTS = 50_000_000

# ZeRO-3: parameters with fewer elements are not partitioned
PERSISTENCE_THRESHOLD = 100_000

# ZeRO-3: limit on gathered weights, and the reuse distance below which weights stay gathered
LIVE_ELEMENTS = 1_000_000_000


def deepspeed_config(config: RunConfig, dp_size: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration, the same on every rank.

    Gradients are accumulated and reduced in fp32 whatever the weights' format. The engine supplies
    the optimizer, the learning rate and the loss scale.

    Raises:
        ConfigError: stage 0 with a 16-bit format, or ``train.global_batch_size`` is not divisible.
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
        # Stage 0 would not report the norm; the engine clips there.
        "gradient_clipping": (config.optimizer.clip_grad_norm or 0.0)
        if precision.zero_stage
        else 0.0,
        # UncorrectedAdamW is elementwise, so it is correct on flat partitions.
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own CPU Adam is compiled at run time; torch's fused one needs no compiler.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        # It would synchronise with the device before every micro batch.
        "timers": {"throughput": {"enabled": False}},
    }
    if precision.dtype == "bf16":
        settings["bf16"] = {
            "enabled": True,
            "check_grad_overflow": True,
            # Add to the fp32 sums in backward: bf16 gradients do not exist all together.
            "immediate_grad_update": True,
        }
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
        # True would replace torch.nn.functional.linear for the rest of the process.
        zero["memory_efficient_linear"] = False
        zero["override_module_apply"] = False
    return zero

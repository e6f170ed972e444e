"""Tensor and sequence parallelism for the single-device model, and its initialisation."""

from megatron_deberta.distributed.parallelize.build import ShardedModel, build_model
from megatron_deberta.distributed.parallelize.plan import ParameterSpec

__all__ = ["ParameterSpec", "ShardedModel", "build_model"]

"""Rewrites the single-device model for tensor and sequence parallelism, and fills it."""

from megatron_deberta.distributed.parallelize.build import ShardedModel, build_model
from megatron_deberta.distributed.parallelize.spec import ParameterSpec

__all__ = ["ParameterSpec", "ShardedModel", "build_model"]

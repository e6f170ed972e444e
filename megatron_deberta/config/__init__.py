"""Typed configuration: the schema, its rules, and reading it from YAML and the command line."""

from megatron_deberta.config.loader import (
    config_from_dict,
    config_to_dict,
    load_config,
    save_config,
)
from megatron_deberta.config.rules import (
    BatchArithmetic,
    batch_arithmetic,
    validate,
    validate_for_world,
)
from megatron_deberta.config.schema import RunConfig

__all__ = [
    "BatchArithmetic",
    "RunConfig",
    "batch_arithmetic",
    "config_from_dict",
    "config_to_dict",
    "load_config",
    "save_config",
    "validate",
    "validate_for_world",
]

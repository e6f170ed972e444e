"""Names, shapes and number of parameters, computed on the ``meta`` device."""

from __future__ import annotations

import math

import torch

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.task_models import model_class


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return canonical name -> logical shape of every parameter, in the model's order."""
    with torch.device("meta"):
        model = model_class(config)(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def count_parameters(config: ModelConfig) -> int:
    """Count the parameters of the model, tied embeddings once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())

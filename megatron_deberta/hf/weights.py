"""Builds our own model, filled with weights, for use outside training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model import DebertaForPretraining, RuntimeOptions


def build_filled(
    config: ModelConfig, read: Callable[[str], Tensor], attention_backend: str | None = None
) -> DebertaForPretraining:
    """Return the single-device model in evaluation mode, on the CPU, fp32.

    Args:
        config: the architecture.
        read: gives the logical tensor of a canonical name.
        attention_backend: of the attention operator; None lets it choose.
    """
    with torch.device("meta"):
        model = DebertaForPretraining(config, RuntimeOptions(attention_backend=attention_backend))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(name))
    return model.eval()

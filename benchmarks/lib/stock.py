"""The same DeBERTa as transformers' stock class, without mask decoder and absolute positions."""

from __future__ import annotations

import re

import torch
from torch import nn
from transformers import DebertaV2Config

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.hf.config import SpecialIds, to_hf_config
from megatron_deberta.hf.names import hf_tensors


def stock_config(model: ModelConfig) -> DebertaV2Config:
    """Return the configuration of ``DebertaV2ForMaskedLM`` for the same encoder."""
    fields = to_hf_config(model, "deberta-v2", SpecialIds(), "float32")
    return DebertaV2Config(**fields | {"legacy": True})


def copy_from_stock(target: nn.Module, stock: nn.Module, model: ModelConfig) -> None:
    """Copy the weights of transformers' ``stock`` into ``target``."""
    weights = stock.state_dict()
    with torch.no_grad():
        for tensor in hf_tensors(model, "deberta-v2"):
            name = re.sub(r"^lm_predictions\.lm_head\.", "cls.predictions.", tensor.name)
            name = re.sub(
                r"^cls\.predictions\.(dense|LayerNorm)", r"cls.predictions.transform.\1", name
            )
            for part, value in tensor.unpack(weights[name]).items():
                # The vocabulary of tensor-parallel ranks is padded at its end.
                target.get_parameter(part)[: len(value)] = value

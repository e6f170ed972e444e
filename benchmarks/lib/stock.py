"""The same DeBERTa as transformers' stock class, without mask decoder and absolute positions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import DebertaV2Config

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.hf.config import SpecialIds, to_hf_config
from megatron_deberta.hf.names import HFTensor, hf_tensors


def stock_config(model: ModelConfig) -> DebertaV2Config:
    """Return the configuration of ``DebertaV2ForMaskedLM`` for the same encoder."""
    fields = to_hf_config(model, "deberta-v2", SpecialIds(), "float32")
    return DebertaV2Config(**fields | {"legacy": True})


def copy_from_stock(target: nn.Module, stock: nn.Module, model: ModelConfig) -> None:
    """Copy the weights of transformers' ``stock`` into ``target``."""
    weights = stock.state_dict()
    with torch.no_grad():
        for tensor, name in _stock_tensors(model):
            for part, value in tensor.unpack(weights[name]).items():
                # The vocabulary of tensor-parallel ranks is padded at its end.
                target.get_parameter(part)[: len(value)] = value


def copy_to_stock(weights: Mapping[str, Tensor], stock: nn.Module, model: ModelConfig) -> None:
    """Copy weights by canonical name into transformers' ``stock``, all of whose weights they are.

    Raises:
        ValueError: the stock model has further parameters.
    """
    rest = {name for name, _ in stock.named_parameters()}
    with torch.no_grad():
        for tensor, name in _stock_tensors(model):
            packed = tensor.pack([weights[part] for part in tensor.canonical_names])
            stock.get_parameter(name).copy_(packed)
            rest.remove(name)
    if rest:
        raise ValueError(f"no weights for {sorted(rest)}")


def _stock_tensors(model: ModelConfig) -> Iterator[tuple[HFTensor, str]]:
    """Yield every tensor with its name in ``DebertaV2ForMaskedLM``."""
    for tensor in hf_tensors(model, "deberta-v2"):
        name = re.sub(r"^lm_predictions\.lm_head\.", "cls.predictions.", tensor.name)
        yield (
            tensor,
            re.sub(r"^cls\.predictions\.(dense|LayerNorm)", r"cls.predictions.transform.\1", name),
        )

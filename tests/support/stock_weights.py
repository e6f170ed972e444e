"""Copy weights of transformers' models to this project's, independently of the export code."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from transformers import DebertaV2Config

from megatron_deberta.config.schema import ModelConfig

_LAYER, _STOCK_LAYER = r"^encoder\.layers\.(\d+)\.", r"deberta.encoder.layer.\1."
_STOCK = (
    (r"^embeddings\.token\.weight$", "deberta.embeddings.word_embeddings.weight"),
    (r"^embeddings\.position\.weight$", "deberta.embeddings.position_embeddings.weight"),
    (r"^embeddings\.norm\.", "deberta.embeddings.LayerNorm."),
    (r"^encoder\.relative_positions\.weight$", "deberta.encoder.rel_embeddings.weight"),
    (r"^encoder\.relative_positions\.norm\.", "deberta.encoder.LayerNorm."),
    (r"^encoder\.conv\.conv\.", "deberta.encoder.conv.conv."),
    (r"^encoder\.conv\.norm\.", "deberta.encoder.conv.LayerNorm."),
    (_LAYER + r"attention\.(query|key|value)\.", _STOCK_LAYER + r"attention.self.\2_proj."),
    (
        _LAYER + r"attention\.position_(key|query)\.",
        _STOCK_LAYER + r"attention.self.pos_\2_proj.",
    ),
    (_LAYER + r"attention\.output\.", _STOCK_LAYER + "attention.output.dense."),
    (_LAYER + r"attention\.norm\.", _STOCK_LAYER + "attention.output.LayerNorm."),
    (_LAYER + r"ffn\.up\.", _STOCK_LAYER + "intermediate.dense."),
    (_LAYER + r"ffn\.down\.", _STOCK_LAYER + "output.dense."),
    (_LAYER + r"ffn\.norm\.", _STOCK_LAYER + "output.LayerNorm."),
    (r"^head\.transform\.", "cls.predictions.transform.dense."),
    (r"^head\.norm\.", "cls.predictions.transform.LayerNorm."),
    (r"^head\.bias$", "cls.predictions.bias"),
)


def stock_name(name: str) -> str | None:
    """Return a parameter's name in ``DebertaV2ForMaskedLM``, or None."""
    for pattern, replacement in _STOCK:
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name)
    return None


def copy_from_stock(model: nn.Module, stock: nn.Module) -> None:
    """Copy the weights of ``stock`` to ``model``; parameters missing in ``stock`` are unchanged."""
    source = dict(stock.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            other = source.get(stock_name(name) or "")
            if other is not None:
                # A sharded vocabulary is padded at its end.
                parameter[: len(other)] = other


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Set all parameters to random values, including norms and biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            centre = 1.0 if re.search(r"[nN]orm\.weight$", name) else 0.0
            parameter.copy_(centre + 0.1 * noise)


def gradients_by_stock_name(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of ``model`` by transformers' names."""
    named = {stock_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad for name, grad in named.items() if name is not None}


def stock_config(config: ModelConfig) -> DebertaV2Config:
    """Return transformers' configuration of the same encoder."""
    terms = [t for t in ("c2p", "p2c") if t in config.position_terms]
    return DebertaV2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.ffn_hidden_size,
        max_position_embeddings=config.max_position_embeddings,
        type_vocab_size=0,
        layer_norm_eps=config.layer_norm_eps,
        relative_attention=config.position_terms != "none",
        max_relative_positions=config.max_relative_positions,
        position_buckets=config.position_buckets or -1,
        norm_rel_ebd="layer_norm" if config.normalize_position_table else "none",
        share_att_key=config.share_position_projections,
        pos_att_type=terms,
        position_biased_input=False,
        conv_kernel_size=config.conv_kernel_size or 0,
        conv_act=config.conv_activation,
        pad_token_id=0,
    )

"""Parameter counts against published figures and transformers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import DebertaV2Model

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model import count_parameters, parameter_shapes
from tests.support.stock_weights import stock_config

V1 = ModelConfig(
    vocab_size=50265,
    position_buckets=0,
    share_position_projections=False,
    normalize_position_table=False,
    key_bias=False,
    position_key_bias=False,
)
WIDE = ModelConfig(
    num_layers=24, hidden_size=1536, num_heads=24, ffn_hidden_size=6144, conv_kernel_size=3
)
V1_LARGE = replace(V1, num_layers=24, hidden_size=1024, num_heads=16, ffn_hidden_size=4096)
PUBLISHED_MILLIONS = {
    "v1-base": (V1, 139),
    "v1-large": (V1_LARGE, 405),
    "v1-xlarge": (replace(V1_LARGE, num_layers=48), 758),
    "900m": (WIDE, 885),
    "1.5b": (replace(WIDE, num_layers=48), 1564),
    "base": (ModelConfig(), 184),
}


@cache
def encoder_parameters(config: ModelConfig) -> int:
    shapes = parameter_shapes(config)
    return sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if not name.startswith(("head.", "mask_decoder."))
    )


@pytest.mark.parametrize("name", PUBLISHED_MILLIONS)
def test_encoder_has_the_published_size(name: str) -> None:
    config, millions = PUBLISHED_MILLIONS[name]
    assert encoder_parameters(config) == pytest.approx(millions * 1e6, abs=0.6e6)


@pytest.mark.parametrize("name", ["900m", "1.5b", "base"])
def test_encoder_has_the_stock_class_size(name: str) -> None:
    config = PUBLISHED_MILLIONS[name][0]
    with torch.device("meta"):
        stock = DebertaV2Model(stock_config(config))
    assert encoder_parameters(config) == sum(p.numel() for p in stock.parameters())


def test_count_includes_head_and_decoder() -> None:
    config = ModelConfig()
    width = config.hidden_size
    head = width * width + width + 2 * width + config.vocab_size
    positions = config.max_position_embeddings * width
    assert count_parameters(config) == encoder_parameters(config) + head + positions

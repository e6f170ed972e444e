from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2 import modeling_deberta_v2

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import CheckpointError
from megatron_deberta.hf.config import (
    SpecialIds,
    choose_model_type,
    from_hf_config,
    to_hf_config,
)
from megatron_deberta.hf.heads import task_head
from tests.support.tiny_models import V2
from tests.unit.hf.test_hf_names import ROBERTA, V1

SEPARATE = replace(V2, share_position_projections=False)


@pytest.mark.parametrize(
    ("config", "model_type"),
    [
        (V2, "deberta-v2"),
        (replace(V2, conv_kernel_size=3), "deberta-v2"),
        (replace(V2, position_buckets=0), "deberta-v2"),
        (replace(V2, position_terms="none"), "deberta-v2"),
        (replace(V2, position_terms="c2p", p2c_index="paper"), "deberta-v2"),
        (replace(SEPARATE, position_terms="p2c", position_key_bias=False), "deberta-v2"),
        (replace(V2, absolute_positions="none", mask_decoder_passes=0), "deberta-v2"),
        (V1, "deberta"),
        (replace(V1, position_terms="p2c", position_key_bias=True), "deberta"),
        (replace(V1, position_terms="none", normalize_position_table=True), "deberta"),
        (ROBERTA, "roberta"),
    ],
)
def test_stock_types(config: ModelConfig, model_type: str) -> None:
    assert choose_model_type(config) == (model_type, "")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (replace(V2, p2c_index="paper"), "p2c_index"),
        (replace(V2, absolute_positions="input"), "input"),
        (replace(V2, absolute_positions="input", mask_decoder_passes=0), "input"),
        (replace(ROBERTA, mask_decoder_passes=2), "input"),
        (replace(ROBERTA, conv_kernel_size=3), "input"),
        (replace(ROBERTA, key_bias=False), "input"),
        (replace(V2, key_bias=False), "share_position_projections"),
        (replace(V1, conv_kernel_size=3), "conv_kernel_size"),
        (replace(V1, position_buckets=8), "position_buckets"),
        (replace(V1, normalize_position_table=True), "normalize_position_table"),
        (replace(V1, position_key_bias=True), "position_key_bias"),
        (replace(SEPARATE, position_key_bias=False), "position_key_bias"),
    ],
)
def test_what_stock_classes_cannot_express_says_why(config: ModelConfig, word: str) -> None:
    model_type, reason = choose_model_type(config)
    assert model_type == "megatron-deberta"
    assert word in reason


@pytest.mark.parametrize("module", [modeling_deberta, modeling_deberta_v2])
def test_every_field_the_stock_classes_read_is_written(module: Any) -> None:
    """Many are read by ``getattr`` with a default that could be wrong."""
    source = inspect.getsource(module)
    read = set(re.findall(r'getattr\(config, "(\w+)"', source)) | set(
        re.findall(r"\bconfig\.(\w+)", source)
    )
    not_architecture = {
        "num_labels", "problem_type", "output_attentions", "output_hidden_states", "return_dict",
        "use_return_dict", "keys_to_ignore_at_inference",
    }  # fmt: skip
    written = to_hf_config(V2, "deberta-v2", SpecialIds(), "float32").keys()
    assert read - not_architecture <= written


@pytest.mark.parametrize(
    "config",
    [
        V2, V1, replace(V2, conv_kernel_size=3), SEPARATE,
        replace(V2, p2c_index="paper", absolute_positions="input", key_bias=False),
    ],
)  # fmt: skip
def test_there_and_back(config: ModelConfig) -> None:
    model_type, _ = choose_model_type(config)
    fields = to_hf_config(config, model_type, SpecialIds(), "float32")
    assert from_hf_config(fields, model_type) == config


def test_released_config_means_what_the_release_computes() -> None:
    """experiments/language_model/deberta_xxlarge.json of microsoft/DeBERTa, sizes cut."""
    fields = {
        "attention_head_size": 64, "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 128, "initializer_range": 0.02,
        "intermediate_size": 512, "layer_norm_eps": 1e-7, "max_position_embeddings": 512,
        "max_relative_positions": -1, "norm_rel_ebd": "layer_norm", "num_attention_heads": 2,
        "num_hidden_layers": 2, "padding_idx": 0, "pos_att_type": "p2c|c2p",
        "position_biased_input": False, "position_buckets": 256, "relative_attention": True,
        "share_att_key": True, "type_vocab_size": 0, "vocab_size": 128100,
        "conv_kernel_size": 3, "conv_act": "gelu",
    }  # fmt: skip
    config = from_hf_config(fields, "deberta-v2")
    assert config == ModelConfig(
        num_layers=2, hidden_size=128, num_heads=2, ffn_hidden_size=512, conv_kernel_size=3
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", 3),
        ("hidden_size", "32"),
        ("hidden_size", 32.0),
        ("num_hidden_layers", True),
        ("vocab_size", None),
        ("type_vocab_size", -1),
        ("max_position_embeddings", -1),
        ("max_position_embeddings", "64"),
        ("max_relative_positions", None),
        ("position_buckets", [8]),
        ("conv_kernel_size", "3"),
        ("mask_decoder_passes", {}),
        ("hidden_dropout_prob", "0.1"),
        ("layer_norm_eps", None),
        ("initializer_range", float("nan")),
        ("share_att_key", "true"),
        ("position_biased_input", 0),
        ("p2c_index", "papers"),
        ("absolute_positions", ["input"]),
        ("pos_att_type", 3),
        ("pos_att_type", [1]),
        ("pad_token_id", "0"),
        ("conv_act", ["gelu"]),
    ],
)
def test_fields_of_a_wrong_type_are_refused_by_name(key: str, value: object) -> None:
    fields = to_hf_config(V2, "deberta-v2", SpecialIds(), "float32") | {key: value}
    for model_type in ("deberta", "deberta-v2", "megatron-deberta"):
        with pytest.raises(CheckpointError, match=re.escape(f"{key}={value!r}")):
            from_hf_config(fields, model_type)


def test_dropout_of_a_head_is_that_of_the_first_field() -> None:
    """Fields that it does not use are checked with those of the model."""
    fields = {
        "architectures": ["DebertaV2ForSequenceClassification"], "num_labels": 2,
        "cls_dropout": 0.25, "hidden_dropout_prob": "x",
    }  # fmt: skip
    assert task_head(fields).dropout == 0.25


def test_no_number_below_1_is_a_convolution() -> None:
    fields = to_hf_config(V2, "deberta-v2", SpecialIds(), "float32") | {"conv_kernel_size": -1}
    assert from_hf_config(fields, "deberta-v2").conv_kernel_size is None


def test_architectures_that_are_no_list_name_no_head() -> None:
    assert task_head({"architectures": 1, "id2label": True}).head == "mlm"


def test_positions_that_are_all_padding_are_refused() -> None:
    fields = to_hf_config(ROBERTA, "roberta", SpecialIds(), "float32")
    with pytest.raises(CheckpointError, match="max_position_embeddings=1 "):
        from_hf_config(fields | {"max_position_embeddings": 1}, "roberta")


def test_config_without_sizes_is_refused() -> None:
    with pytest.raises(CheckpointError, match="vocab_size"):
        from_hf_config({"model_type": "deberta-v2"}, "deberta-v2")

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.hf.names import ModelType, hf_tensors, standard_names
from megatron_deberta.model import parameter_shapes
from tests.support.tiny_models import V1, V2, random_weights

ROBERTA = replace(V2, position_terms="none", absolute_positions="input", mask_decoder_passes=0)
CASES: list[tuple[ModelConfig, ModelType]] = [
    (V2, "deberta-v2"),
    (replace(V2, conv_kernel_size=3, share_position_projections=False), "deberta-v2"),
    (V1, "deberta"),
    (replace(V1, position_terms="p2c"), "deberta"),
    (ROBERTA, "roberta"),
    (replace(V2, absolute_positions="input"), "megatron-deberta"),
]


@pytest.mark.parametrize(("config", "model_type"), CASES)
def test_pack_and_unpack_keep_every_bit(config: ModelConfig, model_type: ModelType) -> None:
    weights = random_weights(config)
    back = {}
    names = []
    for entry in hf_tensors(config, model_type, pad_token_id=1):
        packed = entry.pack([weights[name] for name in entry.canonical_names])
        assert tuple(packed.shape) == entry.shape
        names.append(entry.name)
        back.update(entry.unpack(packed))
    assert len(set(names)) == len(names)
    assert back.keys() == parameter_shapes(config).keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_v1_interleaves_rows_head_by_head() -> None:
    """Inverse of ``_pre_load_hook`` in microsoft/DeBERTa."""
    weights = random_weights(V1)
    stem = "encoder.layers.1.attention"
    entry = next(
        entry
        for entry in hf_tensors(V1, "deberta")
        if entry.name == "deberta.encoder.layer.1.attention.self.in_proj.weight"
    )
    packed = entry.pack([weights[f"{stem}.{part}.weight"] for part in ("query", "key", "value")])
    by_head = packed.unsqueeze(0).reshape(V1.num_heads, -1, V1.hidden_size)
    for part, chunk in zip(("query", "key", "value"), by_head.chunk(3, dim=1), strict=True):
        expected = chunk.reshape(-1, V1.hidden_size)
        assert torch.equal(weights[f"{stem}.{part}.weight"], expected)


def test_roberta_positions_begin_after_padding() -> None:
    entries = {entry.name: entry for entry in hf_tensors(ROBERTA, "roberta", pad_token_id=1)}
    entry = entries["roberta.embeddings.position_embeddings.weight"]
    table = random_weights(ROBERTA)["embeddings.position.weight"]
    packed = entry.pack([table])
    assert packed.shape[0] == table.shape[0] + 2
    assert torch.equal(packed[2:], table)
    assert not packed[:2].any()


def test_old_spellings_are_brought_into_line() -> None:
    names = [
        "bert.embeddings.word_embeddings.weight",
        "lm_predictions.lm_head.dense.weight",
        "cls.predictions.transform.LayerNorm.bias",
        "cls.predictions.bias",
    ]
    assert list(standard_names(names, "deberta").values()) == [
        "deberta.embeddings.word_embeddings.weight",
        "lm_predictions.lm_head.dense.weight",
        "lm_predictions.lm_head.LayerNorm.bias",
        "lm_predictions.lm_head.bias",
    ]
    bare = ["embeddings.word_embeddings.weight", "encoder.rel_embeddings.weight"]
    assert standard_names(bare, "deberta-v2")[bare[1]] == "deberta.encoder.rel_embeddings.weight"
    assert standard_names(bare, "roberta")[bare[0]] == "roberta.embeddings.word_embeddings.weight"

"""Imported models of transformers: same outputs, and bit-identical when exported again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DebertaConfig,
    DebertaModel,
    DebertaV2Config,
    DebertaV2Model,
    RobertaConfig,
    RobertaForMaskedLM,
)

from megatron_deberta.errors import CheckpointError
from megatron_deberta.files import sha256_file
from megatron_deberta.hf.config import SpecialIds, choose_model_type
from megatron_deberta.hf.export_model import write_hf_model
from megatron_deberta.hf.loading import build_model
from megatron_deberta.hf.published import Release, Source, open_release
from megatron_deberta.model import DebertaForPretraining
from megatron_deberta.model.inputs import ModelInputs
from tests.parity.test_export import make_batch
from tests.support.stock_weights import randomize
from tests.support.tolerances import FP32_MODEL

SIZES = {
    "vocab_size": 208,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
RELATIVE = {
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
}
BUCKETS = {
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "max_relative_positions": 32,
}
V1 = DebertaConfig(**SIZES, **RELATIVE)
V2 = DebertaV2Config(**SIZES, **RELATIVE, **BUCKETS, conv_kernel_size=3, conv_act="gelu")
V3 = DebertaV2Config(**SIZES, **RELATIVE, **BUCKETS)


def read(directory: Path, source: Source = "hf", **options: object) -> Release:
    scratch = directory.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    return open_release(directory, source, scratch, **options)


def weights_of(release: Release) -> dict[str, Tensor]:
    return dict(release.tensors())


def filled(release: Release) -> DebertaForPretraining:
    weights = weights_of(release)
    return build_model(release.config, lambda name: weights[name], "reference")


@pytest.mark.parametrize(
    ("kind", "config"), [(DebertaModel, V1), (DebertaV2Model, V2), (DebertaV2Model, V3)]
)
def test_stock_encoder(
    kind: Callable[..., torch.nn.Module], config: object, tmp_path: Path
) -> None:
    """Head and decoder positions are missing: they are initialised, with a note."""
    stock = kind(config).eval()
    randomize(stock)
    stock.save_pretrained(tmp_path / "in")
    release = read(tmp_path / "in")
    assert release.config.mask_decoder_passes == 2
    (note,) = release.notes
    assert "newly initialised: " in note
    for name in ("mask_decoder.position.weight", "head.transform.weight", "head.bias"):
        assert name in note
    ids, mask = make_batch()
    with torch.no_grad():
        expected = stock(ids, attention_mask=mask.long()).last_hidden_state
        states = filled(release).encode(ModelInputs(ids, mask))
    torch.testing.assert_close(states[mask], expected[mask], **FP32_MODEL)
    fresh = weights_of(release)["head.transform.weight"]
    assert fresh.std().item() == pytest.approx(0.02, rel=0.2)


def test_roberta(tmp_path: Path) -> None:
    config = RobertaConfig(
        **{**SIZES, "max_position_embeddings": 66}, type_vocab_size=1, pad_token_id=1
    )
    stock = RobertaForMaskedLM(config).eval()
    randomize(stock)
    stock.save_pretrained(tmp_path / "in")
    release = read(tmp_path / "in")
    assert release.notes == ()
    assert release.config.max_position_embeddings == 64
    ids, mask = make_batch()
    ids = ids.masked_fill(~mask, 1)
    with torch.no_grad():
        expected = stock(ids, attention_mask=mask.long()).logits
        logits = filled(release).logits(ModelInputs(ids, mask))
    torch.testing.assert_close(logits[mask], expected[mask], **FP32_MODEL)


def released_files(
    kind: str, directory: Path, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return tensors as published by Microsoft: encoder, decoder positions and head."""
    stock, config = {
        "v1": (DebertaModel(V1), V1),
        "v2": (DebertaV2Model(V2), V2),
        "v3": (DebertaV2Model(V3), V3),
    }[kind]
    randomize(stock)
    state = {f"deberta.{name}": value.detach() for name, value in stock.state_dict().items()}
    head = {
        "deberta.embeddings.position_embeddings.weight": (64, 32),
        "lm_predictions.lm_head.dense.weight": (32, 32),
        "lm_predictions.lm_head.dense.bias": (32,),
        "lm_predictions.lm_head.LayerNorm.weight": (32,),
        "lm_predictions.lm_head.LayerNorm.bias": (32,),
        "lm_predictions.lm_head.bias": (208,),
    }
    state |= {name: torch.randn(shape) for name, shape in head.items()}
    state = {name: value.to(dtype).contiguous() for name, value in state.items()}
    directory.mkdir()
    fields = config.to_dict()
    fields["pos_att_type"] = "p2c|c2p"
    (directory / "config.json").write_text(json.dumps(fields))
    return state


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["v1", "v2", "v3"])
def test_import_and_export_are_bit_identical(kind: str, dtype: str, tmp_path: Path) -> None:
    torch_dtype = {"fp32": torch.float32, "fp16": torch.float16}[dtype]
    state = released_files(kind, tmp_path / "in", torch_dtype)
    save_file(state, tmp_path / "in" / "model.safetensors")
    release = read(tmp_path / "in")
    assert release.notes == ()
    weights = weights_of(release)
    model_type, _ = choose_model_type(release.config)
    assert model_type == ("deberta" if kind == "v1" else "deberta-v2")
    out = tmp_path / "out"
    out.mkdir()
    write_hf_model(out, release.config, model_type, lambda n: weights[n], SpecialIds(), dtype)
    back = load_file(out / "model.safetensors")
    assert back.keys() == state.keys()
    for name, value in state.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value), name


@pytest.mark.parametrize("kind", [pytest.param("v1", marks=pytest.mark.slow), "v2", "v3"])
def test_microsoft_files(kind: str, tmp_path: Path) -> None:
    """First releases: prefix ``bert.``, a config without type, an RTD head; v1 is a pickle."""
    state = released_files(kind, tmp_path / "hf")
    save_file(state, tmp_path / "hf" / "model.safetensors")
    expected = weights_of(read(tmp_path / "hf"))

    directory = tmp_path / "ms"
    directory.mkdir()
    fields = json.loads((tmp_path / "hf" / "config.json").read_text())
    fields.pop("model_type")
    (directory / "model_config.json").write_text(json.dumps(fields))
    old = {name.replace("deberta.", "bert.", 1): value for name, value in state.items()}
    old["mask_predictions.dense.weight"] = torch.zeros(2, 2)
    if kind == "v1":
        file = directory / "pytorch.model-001000.bin"
        torch.save(old, file)
        with pytest.raises(CheckpointError, match="--allow-pickle-weights-only"):
            read(directory, "microsoft")
        release = read(directory, "microsoft", allow_pickle=True, sha256=sha256_file(file))
    else:
        save_file(old, directory / "pytorch.model.safetensors")
        release = read(directory, "microsoft")
    assert release.notes == ("ignored, not part of the model: mask_predictions.dense.weight",)
    weights = weights_of(release)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_own_type_is_imported(tmp_path: Path) -> None:
    from tests.support.tiny_models import V2 as OURS
    from tests.support.tiny_models import random_weights

    config = replace(OURS, p2c_index="paper", key_bias=False)
    weights = random_weights(config)
    (tmp_path / "in").mkdir()
    write_hf_model(tmp_path / "in", config, "megatron-deberta", lambda n: weights[n], SpecialIds())
    release = read(tmp_path / "in")
    assert release.config == config
    back = weights_of(release)
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_vocabulary_size_is_that_of_the_table(tmp_path: Path) -> None:
    """The size of the embedding table overrides the config's vocabulary size."""
    state = released_files("v3", tmp_path / "in")
    for name in ("deberta.embeddings.word_embeddings.weight", "lm_predictions.lm_head.bias"):
        state[name] = state[name][:200].clone()
    save_file(state, tmp_path / "in" / "model.safetensors")
    assert read(tmp_path / "in").config.vocab_size == 200


def test_default_of_transformers_is_unchanged() -> None:
    """The import of ``cls.predictions`` heads depends on this default."""
    assert transformers.DebertaV2Config().legacy is True

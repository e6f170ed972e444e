"""Tiny models with random weights, in the files in which Microsoft publishes DeBERTa."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from torch import Tensor
from transformers import DebertaConfig, DebertaModel, DebertaV2Config, DebertaV2Model

from megatron_deberta.hf import legacy_bin, published
from tests.support.tiny_models import TEXT, sentencepiece_model

COMMON = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "relative_attention": True,
    "layer_norm_eps": 1e-7,
    "max_relative_positions": -1,
    "position_biased_input": False,
    "num_attention_heads": 2,
    "type_vocab_size": 0,
}
V1 = COMMON | {"model_type": "deberta", "pos_att_type": "c2p|p2c", "num_hidden_layers": 2}
V3 = COMMON | {
    "model_type": "deberta-v2",
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "num_hidden_layers": 4,
}
V2 = V3 | {"conv_kernel_size": 3, "conv_act": "gelu", "num_hidden_layers": 2}
SIZES = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 2,
    "ffn_hidden_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "max_relative_positions": 64,
    "position_buckets": 16,
}
"""Architecture of ``V3`` as keys of the section ``model``."""


def read_pickles_here(patch: pytest.MonkeyPatch) -> None:
    """Convert ``.bin`` files in this process, not in a child process, which would import torch."""
    patch.setattr(sys, "addaudithook", lambda hook: None)
    patch.setattr(
        published, "convert_bin",
        lambda source, target: legacy_bin._child(str(source), str(target)),
    )  # fmt: skip


@contextmanager
def edited_tensors(folder: Path) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a model's file, and write them back as they are at the end."""
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors")


def write_release(folder: Path, version: Literal["v1", "v2", "v3"], *, generator: bool) -> None:
    """Write config, pickled weights and tokenizer of a model.

    Args:
        folder: to create.
        version: v1 in fp32 with a byte-level tokenizer; the others in fp16 with SentencePiece; v3
            is a discriminator.
        generator: write the generator beside the discriminator.
    """
    folder.mkdir(parents=True)
    fields = {"v1": V1, "v2": V2, "v3": V3}[version]
    rows = write_byte_level(folder) if version == "v1" else write_sentencepiece(folder)
    fields = fields | {"vocab_size": rows}
    write_model(folder, fields, "config.json", "pytorch_model.bin", is_v3=version == "v3")
    if generator:
        half = fields | {"num_hidden_layers": 2}
        write_model(folder, half, "generator_config.json", "pytorch_model.generator.bin")


def write_model(
    folder: Path, fields: dict[str, Any], config: str, weights: str, *, is_v3: bool = False
) -> None:
    """Write config and weights: encoder, decoder's positions, and heads."""
    (folder / config).write_text(json.dumps(fields))
    arguments = fields | {"max_relative_positions": fields["max_position_embeddings"]}
    arguments["pos_att_type"] = fields["pos_att_type"].split("|")
    is_v1 = fields["model_type"] == "deberta"
    stock = (
        DebertaModel(DebertaConfig(**arguments))
        if is_v1
        else DebertaV2Model(DebertaV2Config(**arguments))
    )
    width, rows = fields["hidden_size"], fields["vocab_size"]
    shapes = {
        "deberta.embeddings.position_embeddings.weight": (fields["max_position_embeddings"], width),
        "lm_predictions.lm_head.bias": (rows,),
        **_head("lm_predictions.lm_head", width),
    }
    if is_v3:
        shapes |= {
            "deberta.embeddings.word_embeddings._weight": (rows, width),
            "mask_predictions.classifier.weight": (1, width),
            "mask_predictions.classifier.bias": (1,),
            **_head("mask_predictions", width),
        }
    state = {f"deberta.{name}": value for name, value in stock.state_dict().items()}
    state |= {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}
    dtype = torch.float32 if is_v1 else torch.float16
    pickled: dict[str, Tensor] = {name: value.detach().to(dtype) for name, value in state.items()}
    torch.save(pickled, folder / weights)


def _head(stem: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{stem}.dense.weight": (width, width),
        f"{stem}.dense.bias": (width,),
        f"{stem}.LayerNorm.weight": (width,),
        f"{stem}.LayerNorm.bias": (width,),
    }


def write_sentencepiece(folder: Path) -> int:
    """Write v2's and v3's tokenizer; return the number of rows of the model."""
    model = sentencepiece_model(TEXT * 20, vocab_size=90, hard_vocab_limit=False)
    (folder / "spm.model").write_bytes(model)
    config = {"do_lower_case": False, "vocab_type": "spm"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return SIZES["vocab_size"]


def write_byte_level(folder: Path) -> int:
    """Write v1's tokenizer, a pickle included; return the number of rows of the model."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["[PAD]", "[CLS]", "[SEP]", "[UNK]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.model.save(str(folder))
    path = folder / "vocab.json"
    vocabulary = json.loads(path.read_text())
    vocabulary["[MASK]"] = len(vocabulary)
    path.write_text(json.dumps(vocabulary))
    torch.save({"vocab": vocabulary}, folder / "bpe_encoder.bin")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"do_lower_case": False, "vocab_type": "gpt2"})
    )
    return len(vocabulary)

"""Mapping between canonical parameter names and those of Hugging Face and Microsoft.

Microsoft's v2 and v3 files use transformers' names for the encoder and ``lm_predictions.lm_head``
for the head, so one table serves both; `standard_names` converts older spellings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.config.schema import Head, ModelConfig
from megatron_deberta.model.task_models import parameter_shapes

ModelType: TypeAlias = Literal["deberta", "deberta-v2", "roberta", "megatron-deberta"]
Conversion: TypeAlias = Literal["same", "per_head", "after_padding", "zeros"]

TOKEN_TYPES = "roberta.embeddings.token_type_embeddings.weight"
"""RoBERTa's token-type table; a single row is part of our position table."""

LM_HEAD = "lm_predictions.lm_head"
DISCRIMINATOR_HEAD = "mask_predictions"
OTHER_HEADS = re.compile(
    rf"({DISCRIMINATOR_HEAD}|(roberta\.)?pooler|classifier|qa_outputs)\.|.*position_ids$|.*\._weight$"
)
"""Tensors that a file may have beside those of the model that is read."""
PRETRAINING_HEAD = re.compile(
    r"lm_predictions\.|cls\.predictions\.|lm_head\.|deberta\.embeddings\.position_embeddings\."
)
"""The same of a model with the head of a task."""
TIED_COPIES = re.compile(r"(cls\.predictions\.decoder|lm_head\.decoder)\.(weight|bias)")
TOKEN_TABLE = re.compile(r"(deberta|roberta)\.embeddings\.word_embeddings\.weight")
WRAPPED_TOKEN_TABLE = re.compile(
    r"((?:.+?\.)??)(?:(?:deberta|roberta|bert)\.)?embeddings\.word_embeddings\.weight"
)
"""With or without a prefix before the names of transformers."""
_BODY_STEMS = {
    "embeddings.token": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "mask_decoder.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "encoder.relative_positions": "encoder.rel_embeddings",
    "encoder.relative_positions.norm": "encoder.LayerNorm",
    "encoder.conv.conv": "encoder.conv.conv",
    "encoder.conv.norm": "encoder.conv.LayerNorm",
}
"""Stems below the prefix ``deberta.`` or ``roberta.``."""
_DEBERTA_HEAD_STEMS = {
    "head.transform": f"{LM_HEAD}.dense",
    "head.norm": f"{LM_HEAD}.LayerNorm",
    "head": LM_HEAD,
    "next_sentence.dense": "pooler.dense",
    "next_sentence.classifier": "classifier",
    "pooler.dense": "pooler.dense",
    "classifier": "classifier",
    "qa_outputs": "qa_outputs",
}
_DISCRIMINATOR_STEMS = {
    "head.norm": f"{DISCRIMINATOR_HEAD}.LayerNorm",
    "head.dense": f"{DISCRIMINATOR_HEAD}.dense",
    "head.classifier": f"{DISCRIMINATOR_HEAD}.classifier",
}
"""Head of replaced-token detection, of whatever type the encoder is."""
_ROBERTA_HEAD_STEMS = {
    "head.transform": "lm_head.dense",
    "head.norm": "lm_head.layer_norm",
    "head": "lm_head",
    "next_sentence.dense": "classifier.dense",
    "next_sentence.classifier": "classifier.out_proj",
    "qa_outputs": "qa_outputs",
}
_ROBERTA_TASK_STEMS = {
    "tokens": {"classifier": "classifier"},
    "choices": {"pooler.dense": "roberta.pooler.dense", "classifier": "classifier"},
    "classification": {"pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"},
}
_LAYER_STEMS = {
    "attention.output": "attention.output.dense",
    "attention.norm": "attention.output.LayerNorm",
    "ffn.up": "intermediate.dense",
    "ffn.down": "output.dense",
    "ffn.norm": "output.LayerNorm",
}
_QKV = ("query", "key", "value")
_ATTENTION_STEMS: dict[ModelType, dict[str, str]] = {
    "deberta": {"position_key": "pos_proj", "position_query": "pos_q_proj"},
    "deberta-v2": {
        **{name: f"{name}_proj" for name in _QKV},
        "position_key": "pos_key_proj",
        "position_query": "pos_query_proj",
    },
    "roberta": {name: name for name in _QKV},
}
"""Stems below ``attention.`` and ``attention.self.``; ``megatron-deberta`` is like v2."""
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class HFTensor:
    """A tensor in Hugging Face's format, and the canonical tensors that it consists of."""

    name: str
    shape: tuple[int, ...]
    canonical_names: tuple[str, ...]
    """In the order of `pack`'s arguments; empty for constant content."""
    conversion: Conversion = "same"
    """``same``: one unchanged tensor; ``per_head``: q, k, v rows interleaved by head (v1's
    ``in_proj``); ``after_padding``: preceded by padding rows (RoBERTa); ``zeros``: constant."""
    count: int = 0
    """Number of heads for ``per_head``, of padding rows for ``after_padding``."""

    def pack(self, tensors: list[Tensor]) -> Tensor:
        """Build the tensor from canonical ones.

        Args:
            tensors: in the order of ``canonical_names``, of the shapes ``[...]`` of these.

        Returns:
            ``[*self.shape]``.
        """
        if self.conversion == "zeros":
            return torch.zeros(self.shape)
        if self.conversion == "per_head":
            by_head = [each.reshape(self.count, -1, each.size(-1)) for each in tensors]
            return torch.cat(by_head, dim=1).reshape(self.shape)
        if self.conversion == "after_padding":
            return F.pad(tensors[0], (0, 0, self.count, 0))
        return tensors[0]

    def unpack(self, tensor: Tensor) -> dict[str, Tensor]:
        """Split the tensor into canonical ones; inverse of `pack`.

        Args:
            tensor: ``[*self.shape]``.

        Returns:
            Canonical tensors by name.
        """
        if self.conversion == "zeros":
            return {}
        if self.conversion == "per_head":
            by_head = tensor.reshape(self.count, 3, -1, tensor.size(-1))
            return {
                name: by_head[:, index].reshape(-1, tensor.size(-1)).contiguous()
                for index, name in enumerate(self.canonical_names)
            }
        if self.conversion == "after_padding":
            return {self.canonical_names[0]: tensor[self.count :]}
        return {self.canonical_names[0]: tensor}


def hf_tensors(config: ModelConfig, model_type: ModelType, pad_token_id: int = 0) -> list[HFTensor]:
    """Return every tensor of a model of that type, in the order of our parameters.

    Args:
        config: the architecture.
        model_type: transformers' type; ``megatron-deberta`` uses the names of ``deberta-v2``.
        pad_token_id: RoBERTa's positions start at the row after this one.
    """
    tensors = []
    for name, shape in parameter_shapes(config).items():
        if model_type == "deberta" and re.search(r"attention\.(query|key|value)\.", name):
            tensors += _v1_projection(name, shape, config)
        elif model_type == "roberta" and name == "embeddings.position.weight":
            padding = pad_token_id + 1
            padded = (shape[0] + padding, shape[1])
            hf_name = _hf_name(name, model_type, config.head)
            tensors.append(HFTensor(hf_name, padded, (name,), "after_padding", padding))
        else:
            tensors.append(HFTensor(_hf_name(name, model_type, config.head), shape, (name,)))
    if model_type == "roberta" and config.type_vocab_size == 0:
        tensors.append(HFTensor(TOKEN_TYPES, (1, config.hidden_size), (), "zeros"))
    return tensors


def standard_names(names: Iterable[str], model_type: ModelType) -> dict[str, str]:
    """Map every tensor name of a file to the spelling of `hf_tensors`.

    Converted are the ``bert.`` prefix of Microsoft's first files, encoders saved without a prefix,
    and the head's names in transformers' ``DebertaV2ForMaskedLM``.
    """
    names = list(names)
    bare = any(name.startswith("embeddings.word_embeddings.") for name in names)
    prefix = "roberta" if model_type == "roberta" else "deberta"
    return {
        name: f"{prefix}.{name}"
        if bare and name.startswith(("embeddings.", "encoder."))
        else _standard_name(name)
        for name in names
    }


def _standard_name(name: str) -> str:
    for old, new in (
        ("bert.", "deberta."),
        ("cls.predictions.transform.", f"{LM_HEAD}."),
        ("cls.predictions.bias", f"{LM_HEAD}.bias"),
        # So spelled in the released code
        (f"{DISCRIMINATOR_HEAD}.classifer.", f"{DISCRIMINATOR_HEAD}.classifier."),
    ):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _hf_name(name: str, model_type: ModelType, head: Head) -> str:
    stem, _, kind = name.rpartition(".")
    prefix = "roberta" if model_type == "roberta" else "deberta"
    layer = _LAYER.fullmatch(stem)
    if layer is None:
        if stem in _BODY_STEMS:
            return f"{prefix}.{_BODY_STEMS[stem]}.{kind}"
        heads = _DISCRIMINATOR_STEMS if head == "discriminator" else _DEBERTA_HEAD_STEMS
        if model_type == "roberta" and head != "discriminator":
            sequence = _ROBERTA_TASK_STEMS["classification"]
            heads = _ROBERTA_HEAD_STEMS | _ROBERTA_TASK_STEMS.get(head, sequence)
        return f"{heads[stem]}.{kind}"
    inner = _LAYER_STEMS.get(layer[2])
    if inner is None:
        stems = _ATTENTION_STEMS.get(model_type, _ATTENTION_STEMS["deberta-v2"])
        inner = f"attention.self.{stems[layer[2].removeprefix('attention.')]}"
    return f"{prefix}.encoder.layer.{layer[1]}.{inner}.{kind}"


def _v1_projection(name: str, shape: tuple[int, ...], config: ModelConfig) -> list[HFTensor]:
    """Return the v1 tensor of a query, key or value; nothing if an earlier one contains it."""
    stem, _, kind = name.rpartition(".")
    layer_stem, _, which = stem.rpartition(".")
    index = stem.split(".")[2]
    attention = f"deberta.encoder.layer.{index}.attention.self"
    if kind == "bias":
        return [HFTensor(f"{attention}.{which[0]}_bias", shape, (name,))]
    if which != "query":
        return []
    parts = tuple(f"{layer_stem}.{part}.weight" for part in _QKV)
    packed = (3 * shape[0], shape[1])
    return [HFTensor(f"{attention}.in_proj.weight", packed, parts, "per_head", config.num_heads)]

"""Mapping between ``ModelConfig`` and the ``config.json`` of Hugging Face and Microsoft."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast, get_args

import torch

from megatron_deberta.config.schema import (
    AbsolutePositions,
    ModelConfig,
    P2CIndex,
    PositionTerms,
)
from megatron_deberta.errors import CheckpointError
from megatron_deberta.hf.heads import EMBEDDINGS_FIELD, HEADS, cross_encoder_fields, malformed
from megatron_deberta.hf.names import ModelType
from megatron_deberta.model.heads import pooler_activation

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MODELING_MODULE = "modeling_megatron_deberta"
"""Module of the classes that exports bring with them."""
_CLASS_PREFIX = {
    "deberta": "Deberta", "deberta-v2": "DebertaV2", "roberta": "Roberta",
    "megatron-deberta": "MegatronDeberta",
}  # fmt: skip
"""Of the classes in ``architectures``, those of transformers where it has the type."""
_OWN_CLASS_PREFIX = {
    "deberta": "MegatronDebertaV1", "deberta-v2": "MegatronDebertaV2",
    "megatron-deberta": "MegatronDeberta",
}  # fmt: skip
"""Of the classes of `MODELING_MODULE`."""
_WITH_C2P = ("c2p+p2c", "c2p")
_LARGEST = (1 << 31) - 1
_MAX_LAYERS = 10_000
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_hidden_size",
}
"""Required fields, and the keys of `ModelConfig` that they correspond to."""
_FLOATS = {
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "layer_norm_eps",
}
_FLOAT_DEFAULTS = {
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02,
}  # fmt: skip
_INTEGERS = (
    "max_relative_positions", "position_buckets", "conv_kernel_size", "mask_decoder_passes",
)  # fmt: skip
_BOOLEANS = (
    "relative_attention", "position_biased_input", "share_att_key", "key_bias",
    "position_key_bias", "next_sentence_head", "causal", EMBEDDINGS_FIELD,
)  # fmt: skip
_CHOICES = {
    # Earlier exports say "released" for "microsoft".
    "p2c_index": (*get_args(P2CIndex), "released"),
    "absolute_positions": get_args(AbsolutePositions),
}


def _is_integer(value: Any, minimum: float = -_LARGEST, maximum: int = _LARGEST) -> bool:
    return type(value) is int and minimum <= value <= maximum


def _is_dropout(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value < 1)


def _is_text(value: Any) -> bool:
    return all(isinstance(v, str) for v in (value if isinstance(value, list) else [value or ""]))


_VALUE_CHECKS: tuple[tuple[Iterable[str], Callable[[Any], bool], str], ...] = (
    ((*_SIZES, "max_position_embeddings"), lambda v: _is_integer(v, 1), "a positive integer"),
    (("num_hidden_layers",), lambda v: _is_integer(v, 1, _MAX_LAYERS), "a number of layers"),
    (_INTEGERS, _is_integer, "an integer"),
    (("type_vocab_size",), lambda v: _is_integer(v, 0), "a non-negative integer"),
    (("pad_token_id",), lambda v: v is None or _is_integer(v, 0), "a token id or null"),
    (_FLOATS, lambda v: type(v) in (int, float) and 0 <= v < 1e30, "a non-negative number"),
    (_BOOLEANS, lambda v: isinstance(v, bool), "true or false"),
    (("cls_dropout", "classifier_dropout"), _is_dropout, "a number below 1, or null"),
    (("pos_att_type",), _is_text, "a string or a list of strings"),
    (("norm_rel_ebd",), lambda v: isinstance(v, str), "a string"),
    *(((key,), choices.__contains__, " or ".join(choices)) for key, choices in _CHOICES.items()),
)
"""Fields, the check of their values, and what the error message says is expected."""
UNTRAINED_FIELD = "why_untrained"
"""In ``config.json`` of the export of an import without a trained head: the reason."""
TOKENIZER_FIELD = "tokenizer_fingerprints"
"""In ``config.json`` of an export: fingerprint of the tokenizer used in training and, if different,
of the one beside the file, which gives the same ids."""
THRESHOLDS_FIELD = "label_thresholds"
"""In ``config.json`` of an export for several labels per text: the probability from which each
label, by name, is predicted."""
SENTENCEPIECE_FIELD = "sentencepiece_sha256"
"""In ``config.json`` of an export: SHA-256 (hex) of ``spm.model`` beside it."""
_NEXT_SENTENCE_FIELDS = {
    "next_sentence_head": True,
    "num_labels": 2,
    "id2label": {"0": "IsNext", "1": "NotNext"},
    "label2id": {"IsNext": 0, "NotNext": 1},
}


class SpecialIds(NamedTuple):
    """Special token ids in ``config.json``."""

    pad: int = 0
    bos: int = 1
    eos: int = 2


def choose_model_type(config: ModelConfig) -> tuple[ModelType, str]:
    """Choose the transformers type that computes exactly this architecture.

    Returns:
        The type, and the reason why no stock type fits (empty for stock types).
    """
    relative = config.position_terms != "none"
    at_input = config.absolute_positions == "input"
    if config.head == "autoregressive":
        return "megatron-deberta", "the autoregressive form"
    plain = config.mask_decoder_passes == 0 and config.conv_kernel_size is None
    plain = plain and pooler_activation(config) == "tanh"
    if at_input and not relative and plain and config.key_bias:
        return "roberta", ""
    if at_input:
        return "megatron-deberta", "absolute positions at the input of a DeBERTa"
    if config.p2c_index == "paper" and "p2c" in config.position_terms:
        return "megatron-deberta", "p2c_index: paper"
    if config.key_bias:
        bias = config.share_position_projections or config.position_key_bias
        if bias or config.position_terms not in _WITH_C2P:
            return "deberta-v2", ""
        return "megatron-deberta", "position_key_bias: false with key_bias: true"
    extras = _beyond_v1(config, relative)
    if extras:
        return "megatron-deberta", f"key_bias: false with {', '.join(extras)}"
    return "deberta", ""


def _beyond_v1(config: ModelConfig, relative: bool) -> list[str]:
    """Settings that the class of the first release does not support."""
    shared, buckets = config.share_position_projections, config.position_buckets
    biased = config.position_key_bias and config.position_terms in _WITH_C2P
    settings = {
        f"conv_kernel_size: {config.conv_kernel_size}": config.conv_kernel_size is not None,
        "share_position_projections: true": relative and shared,
        "position_key_bias: true": relative and not shared and biased,
        f"position_buckets: {buckets}": relative and buckets is not None,
        "normalize_position_table: true": relative and config.normalize_position_table,
    }
    return [setting for setting, is_set in settings.items() if is_set]


def to_hf_config(
    config: ModelConfig, model_type: ModelType, ids: SpecialIds, dtype: str
) -> dict[str, Any]:
    """Return the content of ``config.json`` with every field explicit.

    The stock classes read several fields by ``getattr`` with their own defaults, so an omitted
    field could silently select another architecture.

    Args:
        config: the architecture.
        model_type: result of `choose_model_type`.
        ids: special token ids of the exported tokenizer.
        dtype: torch's name of the weights' dtype, e.g. ``float32``.
    """
    fields: dict[str, Any] = {
        "model_type": model_type,
        **{field: getattr(config, key) for field, key in _SIZES.items()},
        "hidden_act": "gelu",
        **{field: getattr(config, key) for field, key in _FLOATS.items()},
        "pad_token_id": ids.pad,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }
    if config.next_sentence_head:
        fields |= _NEXT_SENTENCE_FIELDS
    head = HEADS[config.head]
    kind = f"For{head.kind}" if head.kind else "Model"
    fields["architectures"] = [f"{_CLASS_PREFIX[model_type]}{kind}"]
    if model_type == "roberta":
        fields["max_position_embeddings"] = config.max_position_embeddings + ids.pad + 1
        fields["type_vocab_size"] = max(config.type_vocab_size, 1)
    else:
        fields |= _deberta_fields(config)
    if config.head == "discriminator":
        fields["replaced_token_head"] = True
    elif config.head == "autoregressive":
        # Not ``is_decoder``, which means cross-attention to some of transformers' functions.
        fields |= {"causal": True, "use_cache": False}
    elif config.head == "embed":
        fields[EMBEDDINGS_FIELD] = config.normalize_embeddings
    elif not head.is_pretrained:
        fields |= _task_fields(config)
    if auto_map := _auto_map(config, model_type):
        fields["auto_map"] = auto_map
    return fields


def _auto_map(config: ModelConfig, model_type: ModelType) -> dict[str, str]:
    """Return the exported classes by the Auto class that loads them; empty: none is needed."""
    if model_type == "roberta":
        return {}
    prefix, head, classes = _OWN_CLASS_PREFIX[model_type], HEADS[config.head], {}
    if model_type == "megatron-deberta":
        classes = {"AutoConfig": f"{prefix}Config", "AutoModel": f"{prefix}Model"}
    if config.head == "mlm" or (head.kind and has_own_class(config, model_type)):
        classes[head.auto_class] = f"{prefix}For{head.kind}"
    return {auto_class: f"{MODELING_MODULE}.{name}" for auto_class, name in classes.items()}


def has_own_class(config: ModelConfig, model_type: ModelType) -> bool:
    """Return whether transformers has no class of its own for this type with this head."""
    return model_type == "megatron-deberta" or (model_type, config.head) == ("deberta", "choices")


def _task_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a head: dropout, labels and ``problem_type``."""
    fields: dict[str, Any] = dict.fromkeys(
        ("cls_dropout", "classifier_dropout"), config.head_dropout
    )
    if problem_type := HEADS[config.head].problem_type:
        fields["problem_type"] = problem_type
    if config.head == "rerank":
        fields |= cross_encoder_fields()
    if config.head != "spans":
        names = config.labels or ("LABEL_0",)
        fields["id2label"] = {str(number): name for number, name in enumerate(names)}
        fields["label2id"] = {name: number for number, name in enumerate(names)}
    return fields


def _deberta_fields(config: ModelConfig) -> dict[str, Any]:
    relative = config.position_terms != "none"
    normalized = relative and config.normalize_position_table
    return {
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": config.type_vocab_size,
        "relative_attention": relative,
        "max_relative_positions": config.max_relative_positions,
        "position_buckets": config.position_buckets or -1,
        "pos_att_type": config.position_terms.split("+") if relative else [],
        "share_att_key": config.share_position_projections,
        "norm_rel_ebd": "layer_norm" if normalized else "none",
        "position_biased_input": config.absolute_positions == "input",
        "conv_kernel_size": config.conv_kernel_size or 0,
        "conv_act": config.conv_activation,
        "conv_groups": 1,
        "talking_head": False,
        "attention_head_size": config.hidden_size // config.num_heads,
        "embedding_size": config.hidden_size,
        "pooler_hidden_size": config.hidden_size,
        "pooler_hidden_act": "tanh" if config.next_sentence_head else pooler_activation(config),
        "pooler_dropout": 0.0,
        "cls_dropout": config.hidden_dropout,
        # With legacy, the stock masked-LM class expects other head names and warns that its head is
        # newly initialised; without, it would load our head but compute no mask decoder.
        "legacy": config.mask_decoder_passes > 0,
        "absolute_positions": config.absolute_positions,
        "mask_decoder_passes": config.mask_decoder_passes,
        "p2c_index": config.p2c_index,
        "key_bias": config.key_bias,
        "position_key_bias": config.position_key_bias,
    }


def from_hf_config(fields: dict[str, Any], model_type: ModelType) -> ModelConfig:
    """Convert a ``config.json`` or ``model_config.json``; omitted fields get the release's default.

    Raises:
        CheckpointError: a field is missing, of a wrong type or out of range, or the architecture
            is not supported.
    """
    _check_fields(fields)
    defaults = _FLOAT_DEFAULTS | {"layer_norm_eps": 1e-12 if model_type == "roberta" else 1e-7}
    shared: dict[str, Any] = {
        **{key: fields[field] for field, key in _SIZES.items()},
        **{key: float(fields.get(field, defaults[field])) for field, key in _FLOATS.items()},
        "type_vocab_size": fields.get("type_vocab_size", 0),
        "next_sentence_head": fields.get("next_sentence_head", False),
        "normalize_embeddings": fields.get(EMBEDDINGS_FIELD, False),
    }
    length = fields.get("max_position_embeddings", 512)
    if model_type == "roberta":
        padding = padding_id(fields, model_type)
        if length <= padding + 1:
            raise malformed(
                f"max_position_embeddings={length} leaves no position after pad_token_id={padding}"
            )
        length -= padding + 1
        if shared["type_vocab_size"] == 1:
            # The same row for every token: import adds it to the position table.
            shared["type_vocab_size"] = 0
        return ModelConfig(
            **shared,
            max_position_embeddings=length,
            max_relative_positions=length,
            position_buckets=None,
            position_terms="none",
            share_position_projections=False,
            normalize_position_table=False,
            mask_decoder_passes=0,
            absolute_positions="input",
        )
    return _deberta_config(fields, model_type, shared, length)


def padding_id(fields: dict[str, Any], model_type: ModelType) -> int:
    """Return the configured id of [PAD], or the type's default."""
    pad: int | None = fields.get("pad_token_id")
    return (1 if model_type == "roberta" else 0) if pad is None else pad


def _deberta_config(
    fields: dict[str, Any], model_type: ModelType, shared: dict[str, Any], length: int
) -> ModelConfig:
    _check_stock_type(fields, model_type)
    at_input = fields.get("position_biased_input", True)
    max_distance = fields.get("max_relative_positions", -1)
    terms = _position_terms(fields)
    v1 = model_type == "deberta"
    norms = fields.get("norm_rel_ebd", "none").lower().split("|")
    normalized = "layer_norm" in map(str.strip, norms)
    # As in transformers' class, any number below 1 stands for no convolution.
    kernel = 0 if v1 else max(0, fields.get("conv_kernel_size", 0))
    buckets = fields.get("position_buckets", -1)
    model = ModelConfig(
        **shared,
        head="autoregressive" if fields.get("causal") else "mlm",
        max_position_embeddings=length,
        max_relative_positions=max_distance if max_distance > 0 else length,
        position_buckets=buckets if buckets > 0 and not v1 else None,
        position_terms=terms,
        p2c_index="paper" if fields.get("p2c_index") == "paper" else "microsoft",
        share_position_projections=not v1 and fields.get("share_att_key", False),
        key_bias=fields.get("key_bias", not v1),
        position_key_bias=fields.get("position_key_bias", not v1),
        normalize_position_table=not v1 and normalized and terms != "none",
        conv_kernel_size=kernel or None,
        conv_activation=fields.get("conv_act", "tanh") if kernel else ModelConfig().conv_activation,
        mask_decoder_passes=fields.get("mask_decoder_passes", 0 if at_input else 2),
        absolute_positions=fields.get("absolute_positions", "input" if at_input else "decoder"),
    )
    # The activation of the next-sentence head, where the model has one.
    activation = _pooler_activation(fields)
    if model.next_sentence_head or activation == pooler_activation(model):
        return model
    return replace(model, pooler_activation=activation)


def _pooler_activation(fields: dict[str, Any]) -> Literal["gelu", "tanh"]:
    """Return the activation of the pooler; `_check_fields` rejects others."""
    pooling = fields.get("pooling") or {}
    activation = fields.get("pooler_hidden_act", pooling.get("hidden_act", "gelu"))
    return cast(Literal["gelu", "tanh"], activation)


def _position_terms(fields: dict[str, Any]) -> PositionTerms:
    value = fields.get("pos_att_type") or []
    terms = [t.strip() for t in value.lower().split("|")] if isinstance(value, str) else value
    known = [term for term in ("c2p", "p2c") if term in terms]
    relative = fields.get("relative_attention", False)
    # transformers' scale counts the terms, unknown ones too in v1, also if they are not computed.
    if sorted(known) != sorted(terms) or relative != bool(known):
        raise CheckpointError(
            f"config.json: pos_att_type={fields.get('pos_att_type')!r} with relative_attention="
            f"{relative} is not supported; only c2p and p2c with true, or none with false, can be "
            "imported"
        )
    return cast(PositionTerms, "+".join(known) or "none")


def _check_stock_type(fields: dict[str, Any], model_type: ModelType) -> None:
    """Reject fields of our own type that transformers' classes ignore."""
    if model_type == "megatron-deberta":
        return
    if "p2c" in (fields.get("pos_att_type") or []) and fields.get("p2c_index") == "paper":
        raise _unsupported("p2c_index", "paper", ("microsoft",))
    if fields.get("causal"):
        raise _unsupported("causal", True, (False,))
    at_input = fields.get("position_biased_input", True)
    if "absolute_positions" in fields and (fields["absolute_positions"] == "input") != at_input:
        raise malformed(
            f"absolute_positions={fields['absolute_positions']!r} contradicts "
            f"position_biased_input={at_input}"
        )


def _unsupported(key: str, value: Any, values: Iterable[Any]) -> CheckpointError:
    return CheckpointError(
        f"config.json: {key}={value!r} is not supported; "
        f"only {' or '.join(map(repr, values))} can be imported"
    )


def _check_fields(fields: dict[str, Any]) -> None:
    """Reject missing fields, invalid values and architectures other than ours."""
    for field in _SIZES:
        if field not in fields:
            raise CheckpointError(f"config.json has no {field}; give the model's own config file")
    for keys, is_valid, expected in _VALUE_CHECKS:
        for key in keys:
            if key in fields and not is_valid(fields[key]):
                raise malformed(f"{key}={fields[key]!r} is not {expected}")
    size, heads = fields["hidden_size"], fields["num_attention_heads"]
    if size % heads:
        raise malformed(f"num_attention_heads={heads} does not divide hidden_size={size}")
    pooling = fields.get("pooling") or {}
    if not isinstance(pooling, dict):
        raise _unsupported("pooling", pooling, ({},))
    supported: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("gelu", "gelu_python"),
        "embedding_size": (size,),
        "attention_head_size": (size // heads,),
        "pooler_hidden_size": (size,),
        "pooler_dropout": (0, None),
        "conv_groups": (1,),
        "conv_act": ("gelu", "tanh"),
        "talking_head": (False,),
        "tie_word_embeddings": (True,),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "position_embedding_type": ("absolute",),
        "pruned_heads": ({}, None),
        "quantization_config": (None,),
        "pooling.dropout": (0,),
        "pooling.hidden_size": (size, -1),
        "pooler_hidden_act": ("gelu", "tanh"),
    }
    given = fields | {f"pooling.{key}": value for key, value in pooling.items()}
    given["pooler_hidden_act"] = _pooler_activation(fields)
    for key, values in supported.items():
        if key in given and given[key] not in values:
            raise _unsupported(key, given[key], values)

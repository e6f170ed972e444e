"""Translates our architecture to and from the configurations of Hugging Face and Microsoft.

Owns the choice of ``model_type`` and every field of ``config.json``. Refuses tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from megatron_deberta.config.schema import AbsolutePositions, ModelConfig, P2CIndex, PositionTerms
from megatron_deberta.errors import CheckpointError
from megatron_deberta.hf.names import ModelType

MODELING_MODULE = "modeling_megatron_deberta"
_FILL_MASK_CLASS = {
    "deberta": "DebertaForMaskedLM",
    "deberta-v2": "DebertaV2ForMaskedLM",
    "megatron-deberta": "MegatronDebertaForMaskedLM",
}
_WITH_C2P = ("c2p+p2c", "c2p")
_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
)  # fmt: skip
_INTEGERS = (
    "max_relative_positions",
    "position_buckets",
    "conv_kernel_size",
    "mask_decoder_passes",
    "type_vocab_size",
)
_FLOATS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range", "layer_norm_eps",
)  # fmt: skip
_SWITCHES = (
    "relative_attention", "position_biased_input", "share_att_key", "key_bias",
    "position_key_bias", "next_sentence_head",
)  # fmt: skip
_PAIR_LABELS = {"0": "goes on", "1": "does not"}
_WORDS = {"p2c_index": get_args(P2CIndex), "absolute_positions": get_args(AbsolutePositions)}


@dataclass(frozen=True)
class SpecialIds:
    """Token ids that configurations name."""

    pad: int = 0
    bos: int = 1
    eos: int = 2


def choose_model_type(config: ModelConfig) -> tuple[ModelType, str]:
    """The transformers type that computes exactly this architecture, and why no stock one does.

    Returns:
        The type, and a reason that is empty for the stock types. Checked against the stock classes
        in ``tests/parity/test_export.py``.
    """
    relative = config.position_terms != "none"
    at_input = config.absolute_positions == "input"
    plain = config.mask_decoder_passes == 0 and config.conv_kernel_size == 0
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
    """What the first release's class lacks."""
    extras = []
    if config.conv_kernel_size > 0:
        extras.append(f"conv_kernel_size: {config.conv_kernel_size}")
    if not relative:
        return extras
    if config.share_position_projections:
        extras.append("share_position_projections: true")
    elif config.position_key_bias and config.position_terms in _WITH_C2P:
        extras.append("position_key_bias: true")
    if config.position_buckets > 0:
        extras.append(f"position_buckets: {config.position_buckets}")
    if config.normalize_position_table:
        extras.append("normalize_position_table: true")
    return extras


def to_hf_config(
    config: ModelConfig, model_type: ModelType, ids: SpecialIds, dtype: str
) -> dict[str, Any]:
    """Content of ``config.json``, every field written out.

    The stock classes read several fields by ``getattr`` with defaults of their own, so a field
    left out would silently be another model.

    Args:
        config: the architecture.
        model_type: as `choose_model_type` says.
        ids: special tokens of the tokenizer that goes along.
        dtype: torch's name of the weights' format, e.g. ``float32``.
    """
    fields: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.ffn_hidden_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "initializer_range": config.initializer_range,
        "layer_norm_eps": config.layer_norm_eps,
        "pad_token_id": ids.pad,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }
    if config.next_sentence_head:
        fields |= {"next_sentence_head": True, "num_labels": 2, "id2label": _PAIR_LABELS}
    if model_type == "roberta":
        return fields | {
            "architectures": ["RobertaForMaskedLM"],
            "max_position_embeddings": config.max_position_embeddings + ids.pad + 1,
            "type_vocab_size": max(config.type_vocab_size, 1),
        }
    return fields | _deberta_fields(config, model_type)


def _deberta_fields(config: ModelConfig, model_type: ModelType) -> dict[str, Any]:
    relative = config.position_terms != "none"
    normalized = relative and config.normalize_position_table
    fill_mask = _FILL_MASK_CLASS[model_type]
    auto_map = {"AutoModelForMaskedLM": f"{MODELING_MODULE}.{fill_mask}"}
    if model_type == "megatron-deberta":
        auto_map["AutoConfig"] = f"{MODELING_MODULE}.MegatronDebertaConfig"
        auto_map["AutoModel"] = f"{MODELING_MODULE}.MegatronDebertaModel"
    return {
        "architectures": [fill_mask],
        "auto_map": auto_map,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": config.type_vocab_size,
        "relative_attention": relative,
        "max_relative_positions": config.max_relative_positions,
        "position_buckets": config.position_buckets or -1,
        "pos_att_type": config.position_terms.split("+") if relative else [],
        "share_att_key": config.share_position_projections,
        "norm_rel_ebd": "layer_norm" if normalized else "none",
        "position_biased_input": config.absolute_positions == "input",
        "conv_kernel_size": config.conv_kernel_size,
        "conv_act": config.conv_activation,
        "conv_groups": 1,
        "talking_head": False,
        "attention_head_size": config.hidden_size // config.num_heads,
        "embedding_size": config.hidden_size,
        "pooler_hidden_size": config.hidden_size,
        "pooler_hidden_act": "tanh" if config.next_sentence_head else "gelu",
        "pooler_dropout": 0.0,
        "cls_dropout": config.hidden_dropout,
        # With legacy the stock class for masked language models has another head's names, so it
        # warns of a new head; without, it would load ours and leave out the mask decoder.
        "legacy": config.mask_decoder_passes > 0,
        "absolute_positions": config.absolute_positions,
        "mask_decoder_passes": config.mask_decoder_passes,
        "p2c_index": config.p2c_index,
        "key_bias": config.key_bias,
        "position_key_bias": config.position_key_bias,
    }


def from_hf_config(fields: dict[str, Any], model_type: ModelType) -> ModelConfig:
    """Our architecture of a ``config.json`` or ``model_config.json``.

    Fields that are left out mean what the released code means by that.

    Raises:
        CheckpointError: a field is missing, of a wrong type or out of range, or asks for something
            our model does not compute.
    """
    _refuse_unknown(fields, model_type)
    size, heads = fields["hidden_size"], fields["num_attention_heads"]
    shared: dict[str, Any] = {
        "num_layers": fields["num_hidden_layers"],
        "hidden_size": size,
        "num_heads": heads,
        "ffn_hidden_size": fields["intermediate_size"],
        "vocab_size": fields["vocab_size"],
        "hidden_dropout": float(fields.get("hidden_dropout_prob", 0.1)),
        "attention_dropout": float(fields.get("attention_probs_dropout_prob", 0.1)),
        "initializer_range": float(fields.get("initializer_range", 0.02)),
        "layer_norm_eps": float(
            fields.get("layer_norm_eps", 1e-12 if model_type == "roberta" else 1e-7)
        ),
        "type_vocab_size": _token_types(fields, model_type),
        "next_sentence_head": fields.get("next_sentence_head", False),
    }
    length = fields.get("max_position_embeddings", 512)
    if model_type == "roberta":
        padding = padding_id(fields, model_type)
        if length <= padding + 1:
            raise CheckpointError(
                f"config.json: max_position_embeddings={length} leaves no position after "
                f"pad_token_id={padding}; give the model's own config file"
            )
        length -= padding + 1
        return ModelConfig(
            **shared,
            max_position_embeddings=length,
            max_relative_positions=length,
            position_buckets=0,
            position_terms="none",
            share_position_projections=False,
            normalize_position_table=False,
            mask_decoder_passes=0,
            absolute_positions="input",
        )
    return _deberta_config(fields, model_type, shared, length)


def _token_types(fields: dict[str, Any], model_type: ModelType) -> int:
    """Rows of the token-type table; RoBERTa's single row, same for all tokens, is none."""
    written: int = fields.get("type_vocab_size", 0)
    if written < 0:
        raise CheckpointError(f"config.json: type_vocab_size={written} is below 0; write 0")
    return 0 if model_type == "roberta" and written == 1 else written


def padding_id(fields: dict[str, Any], model_type: ModelType) -> int:
    """Id of [PAD] that a configuration names or, by its type, implies."""
    written: int | None = fields.get("pad_token_id")
    return (1 if model_type == "roberta" else 0) if written is None else written


def _deberta_config(
    fields: dict[str, Any], model_type: ModelType, shared: dict[str, Any], length: int
) -> ModelConfig:
    at_input = fields.get("position_biased_input", True)
    reach = fields.get("max_relative_positions", -1)
    terms = _position_terms(fields)
    v1 = model_type == "deberta"
    normalized = "layer_norm" in str(fields.get("norm_rel_ebd", "none")).lower()
    return ModelConfig(
        **shared,
        max_position_embeddings=length,
        max_relative_positions=reach if reach > 0 else length,
        position_buckets=0 if v1 else max(fields.get("position_buckets", -1), 0),
        position_terms=terms,
        p2c_index=fields.get("p2c_index", "released"),
        share_position_projections=not v1 and fields.get("share_att_key", False),
        key_bias=fields.get("key_bias", not v1),
        position_key_bias=fields.get("position_key_bias", not v1),
        normalize_position_table=not v1 and normalized and terms != "none",
        conv_kernel_size=0 if v1 else fields.get("conv_kernel_size", 0),
        conv_activation=fields.get("conv_act", "tanh"),
        mask_decoder_passes=fields.get("mask_decoder_passes", 0 if at_input else 2),
        absolute_positions=fields.get("absolute_positions", "input" if at_input else "decoder"),
    )


def _position_terms(fields: dict[str, Any]) -> PositionTerms:
    written = fields.get("pos_att_type") or []
    terms = written.lower().split("|") if isinstance(written, str) else written
    known = [term for term in ("c2p", "p2c") if term in {term.strip() for term in terms}]
    if not fields.get("relative_attention", False) or not known:
        return "none"
    return cast(Literal["c2p+p2c", "c2p", "p2c"], "+".join(known))


def _refuse_unknown(fields: dict[str, Any], model_type: ModelType) -> None:
    missing = [key for key in _SIZES if key not in fields]
    if missing:
        raise CheckpointError(f"config.json has no {missing[0]}; give the model's own config file")
    for key, value in fields.items():
        _check_value(key, value)
    size, heads = fields["hidden_size"], fields["num_attention_heads"]
    if size % heads:
        raise CheckpointError(
            f"config.json: num_attention_heads={heads} does not divide hidden_size={size}; "
            "give the model's own config file"
        )
    head_size = size // heads
    required: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("gelu",),
        "embedding_size": (size,),
        "attention_head_size": (head_size,),
        "conv_groups": (1,),
        "conv_act": ("gelu", "tanh"),
        "talking_head": (False,),
        "tie_word_embeddings": (True,),
        "is_decoder": (False,),
        "position_embedding_type": ("absolute",),
    }
    for key, allowed in required.items():
        if key in fields and fields[key] not in allowed:
            raise CheckpointError(
                f"config.json: {key}={fields[key]!r} is not a model we compute; "
                f"only {' or '.join(map(repr, allowed))} can be imported"
            )


def _check_value(key: str, value: object) -> None:
    """Refuse a value that our reading of the field would trip over or misunderstand."""
    number = type(value) in (int, float)
    if key in (*_SIZES, "max_position_embeddings"):
        right, expected = type(value) is int and value > 0, "a whole number above 0"
    elif key in _INTEGERS:
        right, expected = type(value) is int, "a whole number"
    elif key in _FLOATS:
        right, expected = number and cast(float, value) >= 0, "a number from 0"
    elif key in _SWITCHES:
        right, expected = isinstance(value, bool), "true or false"
    elif key in _WORDS:
        right = isinstance(value, str) and value in _WORDS[key]
        expected = " or ".join(_WORDS[key])
    elif key == "pos_att_type":
        terms = value if isinstance(value, list) else [value or ""]
        right, expected = all(isinstance(term, str) for term in terms), "a text or a list of texts"
    elif key == "pad_token_id":
        right = value is None or (type(value) is int and value >= 0)
        expected = "a token id or null"
    else:
        return
    if not right:
        raise CheckpointError(
            f"config.json: {key}={value!r} is not {expected}; give the model's own config file"
        )

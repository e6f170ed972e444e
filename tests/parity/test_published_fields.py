"""Fields of published configs: equal to transformers within 1e-5, or refused by the field's name.

Each case is a tiny model with random weights, built and saved by transformers with one field that
differs from those of the release.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.evaluate.models import open_source_model
from megatron_deberta.hf import use_fast_attention
from megatron_deberta.hf.loading import build_encoder, build_with_head, quiet_transformers
from megatron_deberta.model.inputs import ModelInputs
from tests.support.selection import every
from tests.support.stock_weights import randomize

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 40, "type_vocab_size": 0,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02, "layer_norm_eps": 1e-7, "relative_attention": True,
    "max_relative_positions": -1, "pos_att_type": "p2c|c2p", "position_biased_input": False,
    "pooler_dropout": 0, "pooler_hidden_act": "gelu", "pooler_hidden_size": 16, "pad_token_id": 0,
}  # fmt: skip
"""Fields that the configs of all releases have."""
BASES = {
    "v1": {"model_type": "deberta", **SIZES},
    "v2": {
        "model_type": "deberta-v2", **SIZES, "position_buckets": 8, "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
}  # fmt: skip
PREFIXES = {"v1": "Deberta", "v2": "DebertaV2"}
ROWS, TOKENS, SPANS = "SequenceClassification", "TokenClassification", "QuestionAnswering"
CHOICES, MASKED, ENCODER = "MultipleChoice", "MaskedLM", ""
REFUSED, EQUAL = True, False
THREE = {"id2label": {"0": "a", "1": "b", "2": "c"}}
ABSENT = object()

CASES: list[tuple[str, str, dict[str, Any], bool]] = [
    # Encoder
    ("v1", ENCODER, {}, EQUAL),
    ("v2", ENCODER, {}, EQUAL),
    ("v1", ENCODER, {"hidden_act": "relu"}, REFUSED),
    ("v2", ENCODER, {"hidden_act": "gelu_new"}, REFUSED),
    ("v2", ENCODER, {"hidden_act": "gelu_python"}, EQUAL),
    ("v1", ENCODER, {"layer_norm_eps": 0.1}, EQUAL),
    ("v2", ENCODER, {"layer_norm_eps": 0.1}, EQUAL),
    ("v2", ENCODER, {"layer_norm_eps": ABSENT}, EQUAL),
    ("v1", ENCODER, {"position_biased_input": True}, EQUAL),
    ("v2", ENCODER, {"position_biased_input": True}, EQUAL),
    ("v2", ENCODER, {"position_biased_input": ABSENT}, EQUAL),
    ("v1", ENCODER, {"relative_attention": False}, REFUSED),
    ("v2", ENCODER, {"relative_attention": False}, REFUSED),
    ("v2", ENCODER, {"relative_attention": ABSENT}, REFUSED),
    ("v1", ENCODER, {"relative_attention": False, "pos_att_type": None}, EQUAL),
    ("v2", ENCODER, {"relative_attention": False, "pos_att_type": []}, EQUAL),
    (
        "v2", ENCODER,
        {"relative_attention": False, "pos_att_type": [], "position_biased_input": True}, EQUAL,
    ),
    ("v1", ENCODER, {"max_relative_positions": 5}, EQUAL),
    ("v1", ENCODER, {"max_relative_positions": 0}, EQUAL),
    ("v2", ENCODER, {"max_relative_positions": 12}, EQUAL),
    ("v2", ENCODER, {"max_relative_positions": 100}, EQUAL),
    ("v2", ENCODER, {"max_relative_positions": ABSENT}, EQUAL),
    ("v2", ENCODER, {"position_buckets": -1}, EQUAL),
    ("v2", ENCODER, {"position_buckets": 0}, EQUAL),
    ("v2", ENCODER, {"position_buckets": ABSENT}, EQUAL),
    ("v2", ENCODER, {"position_buckets": 7}, REFUSED),
    ("v2", ENCODER, {"position_buckets": 2}, REFUSED),
    ("v2", ENCODER, {"position_buckets": 64}, REFUSED),
    ("v1", ENCODER, {"position_buckets": 8}, EQUAL),
    ("v2", ENCODER, {"norm_rel_ebd": "none"}, EQUAL),
    ("v2", ENCODER, {"norm_rel_ebd": ABSENT}, EQUAL),
    ("v2", ENCODER, {"norm_rel_ebd": "none | Layer_Norm"}, EQUAL),
    ("v2", ENCODER, {"norm_rel_ebd": "no_layer_norm"}, EQUAL),
    ("v1", ENCODER, {"norm_rel_ebd": "layer_norm"}, EQUAL),
    ("v2", ENCODER, {"share_att_key": False}, EQUAL),
    ("v2", ENCODER, {"share_att_key": ABSENT}, EQUAL),
    ("v1", ENCODER, {"share_att_key": True}, EQUAL),
    ("v1", ENCODER, {"pos_att_type": "c2p|p2c"}, EQUAL),
    ("v1", ENCODER, {"pos_att_type": ["p2c", "c2p"]}, EQUAL),
    ("v1", ENCODER, {"pos_att_type": "C2P | P2C"}, EQUAL),
    ("v1", ENCODER, {"pos_att_type": "c2p"}, EQUAL),
    ("v1", ENCODER, {"pos_att_type": ["p2c"]}, EQUAL),
    ("v2", ENCODER, {"pos_att_type": "c2p"}, EQUAL),
    ("v2", ENCODER, {"pos_att_type": ["p2c"], "share_att_key": False}, EQUAL),
    ("v1", ENCODER, {"pos_att_type": "c2p|p2c|p2p"}, REFUSED),
    ("v1", ENCODER, {"pos_att_type": "c2p|c2p"}, REFUSED),
    ("v2", ENCODER, {"pos_att_type": ["C2P", "P2C"]}, REFUSED),
    ("v2", ENCODER, {"pos_att_type": None}, REFUSED),
    ("v1", ENCODER, {"pos_att_type": ""}, REFUSED),
    ("v2", ENCODER, {"conv_kernel_size": 3}, EQUAL),
    ("v2", ENCODER, {"conv_kernel_size": 5, "conv_act": "gelu"}, EQUAL),
    ("v2", ENCODER, {"conv_kernel_size": 3, "conv_act": "tanh"}, EQUAL),
    ("v2", ENCODER, {"conv_kernel_size": 3, "conv_act": "relu"}, REFUSED),
    ("v2", ENCODER, {"conv_kernel_size": 3, "conv_groups": 2}, REFUSED),
    ("v2", ENCODER, {"conv_kernel_size": 4}, REFUSED),
    ("v1", ENCODER, {"conv_kernel_size": 3}, EQUAL),
    ("v1", ENCODER, {"type_vocab_size": 2}, EQUAL),
    ("v2", ENCODER, {"type_vocab_size": 2}, EQUAL),
    ("v2", ENCODER, {"type_vocab_size": 3}, EQUAL),
    ("v1", ENCODER, {"embedding_size": 8}, REFUSED),
    ("v2", ENCODER, {"embedding_size": 8}, REFUSED),
    ("v2", ENCODER, {"embedding_size": 16}, EQUAL),
    ("v2", ENCODER, {"attention_head_size": 4}, REFUSED),
    ("v1", ENCODER, {"talking_head": True}, REFUSED),
    ("v2", ENCODER, {"pad_token_id": 5}, EQUAL),
    ("v2", ENCODER, {"pad_token_id": None}, EQUAL),
    ("v2", ENCODER, {"padding_idx": 5}, EQUAL),
    ("v2", ENCODER, {"attention_probs_dropout_prob": 0.3}, EQUAL),
    ("v2", ENCODER, {"hidden_dropout_prob": 0}, EQUAL),
    ("v2", ENCODER, {"initializer_range": 0.5}, EQUAL),
    ("v2", ENCODER, {"z_steps": 2}, EQUAL),
    ("v2", ENCODER, {"dtype": "float16"}, EQUAL),
    ("v2", ENCODER, {"torch_dtype": "bfloat16"}, EQUAL),
    ("v2", ENCODER, {"chunk_size_feed_forward": 4}, EQUAL),
    ("v2", ENCODER, {"output_hidden_states": True}, EQUAL),
    ("v2", ENCODER, {"is_decoder": True}, REFUSED),
    ("v2", ENCODER, {"causal": True}, REFUSED),
    ("v2", ENCODER, {"p2c_index": "paper"}, REFUSED),
    ("v2", ENCODER, {"absolute_positions": "input"}, REFUSED),
    ("v2", ENCODER, {"pruned_heads": {"0": [1]}}, REFUSED),
    ("v2", ENCODER, {"quantization_config": {"load_in_8bit": True}}, REFUSED),
    # Masked language model of transformers, without mask decoder
    ("v1", MASKED, {}, EQUAL),
    ("v2", MASKED, {}, EQUAL),
    ("v1", MASKED, {"legacy": False}, EQUAL),
    ("v2", MASKED, {"legacy": False}, EQUAL),
    ("v2", MASKED, {"legacy": True, "position_biased_input": True}, EQUAL),
    ("v1", MASKED, {"tie_word_embeddings": False}, REFUSED),
    ("v2", MASKED, {"tie_word_embeddings": False, "legacy": False}, REFUSED),
    # Heads of tasks
    ("v1", ROWS, {}, EQUAL),
    ("v2", ROWS, {}, EQUAL),
    ("v1", ROWS, {"pooler_hidden_act": "tanh"}, EQUAL),
    ("v2", ROWS, {"pooler_hidden_act": "tanh"}, EQUAL),
    ("v2", ROWS, {"pooler_hidden_act": ABSENT}, EQUAL),
    ("v2", ROWS, {"pooler_hidden_act": "relu"}, REFUSED),
    ("v2", ROWS, {"pooler_hidden_act": "gelu_new"}, REFUSED),
    ("v2", ROWS, {"pooler_dropout": 0.1}, REFUSED),
    ("v2", CHOICES, {"pooler_hidden_act": "tanh"}, EQUAL),
    (
        "v2", ROWS,
        {"relative_attention": False, "pos_att_type": [], "position_biased_input": True}, EQUAL,
    ),
    ("v2", ROWS, {"num_labels": 3}, EQUAL),
    ("v2", ROWS, THREE, EQUAL),
    ("v2", ROWS, THREE | {"label2id": {"a": 0, "b": 1, "c": 2}}, EQUAL),
    ("v2", ROWS, THREE | {"label2id": {"a": 2, "b": 1, "c": 0}}, REFUSED),
    ("v2", ROWS, THREE | {"num_labels": 4}, REFUSED),
    ("v2", ROWS, {"id2label": {"0": "a", "2": "c"}}, REFUSED),
    ("v2", ROWS, {"num_labels": 1}, EQUAL),
    ("v2", ROWS, {"num_labels": 1, "problem_type": "regression"}, EQUAL),
    ("v2", ROWS, {"num_labels": 3, "problem_type": "regression"}, REFUSED),
    ("v2", ROWS, {"num_labels": 1, "problem_type": "multi_label_classification"}, REFUSED),
    ("v2", ROWS, {"problem_type": "multi_label_classification"}, EQUAL),
    ("v2", ROWS, {"problem_type": "single_label_classification"}, EQUAL),
    ("v2", ROWS, {"problem_type": "ranking"}, REFUSED),
    ("v2", ROWS, {"cls_dropout": 0.4}, EQUAL),
    ("v2", ROWS, {"cls_dropout": None}, EQUAL),
    ("v1", TOKENS, THREE, EQUAL),
    ("v2", TOKENS, THREE | {"classifier_dropout": 0.4}, EQUAL),
    ("v2", TOKENS, {"num_labels": 5}, EQUAL),
    ("v1", SPANS, {}, EQUAL),
    ("v2", SPANS, {}, EQUAL),
    ("v2", SPANS, {"num_labels": 3}, REFUSED),
]  # fmt: skip


def published(folder: Path, family: str, head: str, change: dict[str, Any]) -> nn.Module | None:
    """Write a folder as published; return transformers' model, or None where it has none."""
    fields = BASES[family] | {"architectures": [f"{PREFIXES[family]}For{head}"]} | change
    if not head:
        fields["architectures"] = [f"{PREFIXES[family]}Model"]
    fields = {key: value for key, value in fields.items() if value is not ABSENT}
    name = f"{PREFIXES[family]}{'For' + head if head else 'Model'}"
    model_class = getattr(transformers, name)
    try:
        model = model_class(model_class.config_class(**fields))
        randomize(model)
        model.tie_weights()
    except (ValueError, TypeError, AttributeError, RuntimeError, KeyError):
        # Refused by transformers, too; ours must say so before it looks at the weights.
        model = model_class(model_class.config_class(**BASES[family]))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    with quiet_transformers():
        try:
            loaded: nn.Module = model_class.from_pretrained(folder, dtype=torch.float32)
        except (ValueError, TypeError, AttributeError, RuntimeError, KeyError, ImportError):
            return None
        try:
            loaded.eval()(**stock_batch(head, fields.get("type_vocab_size", 0)))
        except (ValueError, RuntimeError):
            return None
    return loaded


def stock_batch(head: str, types: int) -> dict[str, Tensor]:
    """Return the inputs of a transformers class."""
    given = batch(types)
    if head == CHOICES:
        given = {name: rows.unsqueeze(0) for name, rows in given.items()}
    return given


def batch(types: int) -> dict[str, Tensor]:
    ids = torch.randint(6, 64, (2, 30), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(30) < torch.tensor([[30], [21]])).long()
    inputs = {"input_ids": ids, "attention_mask": mask}
    if types:
        inputs["token_type_ids"] = (torch.arange(30) >= 14).long().expand(2, -1)
    return inputs


def outputs(found: Any) -> Tensor:
    if "start_logits" in found:
        return torch.stack([found.start_logits, found.end_logits], -1)
    result: Tensor = found.logits if "logits" in found else found.last_hidden_state
    return result


def our_outputs(folder: Path, head: str, inputs: dict[str, Tensor]) -> Tensor:
    source = open_source_model(folder)
    assert not head or not source.missing
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    types = inputs.get("token_type_ids")
    if not head:
        encoder = build_encoder(source.config, source.read, "reference")
        return encoder(ids, mask, token_type_ids=types).last_hidden_state
    model: Any = build_with_head(source.config, source.read, "reference")
    logits: Tensor = model.logits(ModelInputs(ids, mask, token_type_ids=types))
    return logits.view(1, -1) if head == CHOICES else logits


def compare(family: str, head: str, ours: Tensor, theirs: Tensor, mask: Tensor) -> None:
    if theirs.dim() == 3:
        ours, theirs = ours[mask.bool()], theirs[mask.bool()]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "head", "change", "refused"),
    every(2, CASES, ["slow"]),
    ids=[f"{c[0]}-{c[1] or 'encoder'}-{'-'.join(map(str, c[2]))}-{n}" for n, c in enumerate(CASES)],
)
@torch.no_grad()
def test_field(
    tmp_path: Path, family: str, head: str, change: dict[str, Any], refused: bool
) -> None:
    stock = published(tmp_path, family, head, change)
    inputs = batch(change.get("type_vocab_size", 0))
    mask = inputs["attention_mask"]
    if refused:
        with pytest.raises((CheckpointError, ConfigError)) as error:
            our_outputs(tmp_path, head, inputs)
        assert any(key in str(error.value) for key in change), error.value
    assert stock is not None or refused
    if stock is None:
        return
    given = stock_batch(head, change.get("type_vocab_size", 0))
    theirs = outputs(stock(**given))
    if not refused:
        compare(family, head, our_outputs(tmp_path, head, inputs), theirs, mask)
    try:
        handle = use_fast_attention(stock)
    except ValueError as error:
        assert any(key in str(error) for key in change), error  # noqa: PT017
        return
    with handle:
        compare(family, head, outputs(stock(**given)), theirs, mask)

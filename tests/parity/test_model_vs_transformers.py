"""The single-device model compared with transformers' DeBERTa-v2: outputs and gradients, fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import DebertaV2ForMaskedLM

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.model import RuntimeOptions
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import MaskedLanguageModel
from tests.support.stock_weights import (
    copy_from_stock,
    gradients_by_stock_name,
    randomize,
    stock_config,
)
from tests.support.tolerances import FP32_MODEL

BASE = ModelConfig(
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    ffn_hidden_size=128,
    vocab_size=97,
    max_position_embeddings=64,
    max_relative_positions=32,
    position_buckets=8,
    mask_decoder_passes=0,
    absolute_positions="none",
)
VARIANTS = {
    "1.5b-like": replace(BASE, conv_kernel_size=3),
    "conv-tanh": replace(BASE, conv_kernel_size=3, conv_activation="tanh"),
    "v3-like": BASE,
    "v1-like": replace(
        BASE,
        position_buckets=0,
        max_relative_positions=16,
        share_position_projections=False,
        normalize_position_table=False,
    ),
    "c2p-only": replace(BASE, position_terms="c2p"),
    "p2c-only": replace(BASE, position_terms="p2c"),
    "neither": replace(BASE, position_terms="none"),
    "c2p-only-separate": replace(BASE, position_terms="c2p", share_position_projections=False),
    "p2c-only-separate": replace(BASE, position_terms="p2c", share_position_projections=False),
}


def make_batch(config: ModelConfig, length: int, padded: bool) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, config.vocab_size, (3, length), generator=generator)
    mask = torch.ones(3, length, dtype=torch.bool)
    if padded:
        mask[1, length - 5 :] = False
        mask[2, length // 2 :] = False
        ids = ids.masked_fill(~mask, 0)
    selected = torch.tensor([[0, 3, 7], [1, 4, -1], [2, -1, -1]])
    labels = torch.where(selected >= 0, ids.gather(1, selected.clamp(min=0)), -100)
    return Batch(ModelInputs(ids, mask), selected, labels, sample_index=torch.arange(3))


@pytest.mark.parametrize(
    ("length", "padded", "backend"), [(37, True, "reference"), (53, False, "chunked")]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients(variant: str, length: int, padded: bool, backend: str) -> None:
    config = VARIANTS[variant]
    stock = DebertaV2ForMaskedLM(stock_config(config)).eval()
    randomize(stock)
    model = MaskedLanguageModel(config, RuntimeOptions(attention_backend=backend))
    copy_from_stock(model, stock)
    batch = make_batch(config, length, padded)

    real = batch.inputs.is_token.unsqueeze(-1)
    encoded = model.encode(batch.inputs)
    stock_encoded = stock.deberta(batch.inputs.input_ids, batch.inputs.is_token.long())[0]
    torch.testing.assert_close(encoded * real, stock_encoded * real, **FP32_MODEL)

    full_labels = torch.full_like(batch.inputs.input_ids, -100)
    for row, column, label in zip(
        *torch.where(batch.masked_positions >= 0),
        batch.labels[batch.masked_positions >= 0],
        strict=True,
    ):
        full_labels[row, batch.masked_positions[row, column]] = label
    out = stock(batch.inputs.input_ids, batch.inputs.is_token.long(), labels=full_labels)
    loss = model(batch).losses["masked"].loss
    count = (batch.labels >= 0).sum()
    torch.testing.assert_close(loss / count, out.loss, **FP32_MODEL)
    logits = model.logits(batch.inputs)
    torch.testing.assert_close(logits * real, out.logits * real, **FP32_MODEL)

    (loss / count).backward()
    out.loss.backward()
    actual = gradients_by_stock_name(model)
    expected = {n: p.grad for n, p in stock.named_parameters() if p.grad is not None}
    expected.pop("cls.predictions.decoder.bias", None)
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        torch.testing.assert_close(
            grad, expected[name], **FP32_MODEL, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("variant", ["1.5b-like", "v1-like"])
def test_mask_decoder_built_from_stock_layers(variant: str, backend: str) -> None:
    """The released decoder, built from transformers' last layer, at every position."""
    config = replace(VARIANTS[variant], mask_decoder_passes=2, absolute_positions="decoder")
    stock = DebertaV2ForMaskedLM(stock_config(config)).eval()
    randomize(stock)
    model = MaskedLanguageModel(config, RuntimeOptions(attention_backend=backend))
    randomize(model, seed=5)
    copy_from_stock(model, stock)
    batch = make_batch(config, 41, padded=True)
    assert model.mask_decoder is not None
    assert model.mask_decoder.position is not None
    position_table = model.mask_decoder.position.weight.detach().clone().requires_grad_()

    encoder = stock.deberta.encoder
    states = stock.deberta(
        batch.inputs.input_ids, batch.inputs.is_token.long(), output_hidden_states=True
    ).hidden_states
    hidden = states[-2]
    query = hidden + position_table[: hidden.size(1)]
    extended = encoder.get_attention_mask(batch.inputs.is_token.long())
    relative = encoder.get_rel_pos(hidden)
    table = encoder.get_rel_embedding()
    for _ in range(2):
        query = encoder.layer[-1](
            hidden, extended, query_states=query, relative_pos=relative, rel_embeddings=table
        )[0]
    logits = stock.cls(query)
    valid = batch.masked_positions >= 0
    rows = torch.where(valid)[0]
    selected = logits[rows, batch.masked_positions[valid]]
    expected = torch.nn.functional.cross_entropy(selected, batch.labels[valid], reduction="sum")

    loss = model(batch).losses["masked"].loss
    torch.testing.assert_close(loss, expected, **FP32_MODEL)
    everywhere = model.logits(batch.inputs)
    real = batch.inputs.is_token.unsqueeze(-1)
    torch.testing.assert_close(everywhere * real, logits * real, **FP32_MODEL)

    loss.backward()
    expected.backward()
    torch.testing.assert_close(
        model.mask_decoder.position.weight.grad, position_table.grad, **FP32_MODEL
    )
    expected = {n: p.grad for n, p in stock.named_parameters() if p.grad is not None}
    for name, grad in gradients_by_stock_name(model).items():
        torch.testing.assert_close(
            grad, expected[name], **FP32_MODEL, msg=lambda m, name=name: f"{name}: {m}"
        )

"""RetroMAE: its losses and gradients by definition, its metrics, and the configs it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.config import validate
from megatron_deberta.config.schema import DataConfig, ObjectiveConfig, RunConfig
from megatron_deberta.data.batch import Batch, DecoderRows
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.errors import ConfigError
from megatron_deberta.evaluate.validation import evaluate
from megatron_deberta.model import DropoutSeeds, RuntimeOptions
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.retromae import RetroMAEModel
from tests.support.stock_weights import randomize
from tests.support.tiny_models import V2

DISTANCE, LENGTH = 4, 12
MODEL = replace(
    V2, num_layers=2, max_position_embeddings=LENGTH, max_relative_positions=DISTANCE,
    position_buckets=None, p2c_index="paper",
)  # fmt: skip
"""With the paper's clipped distances, so that the definition below is short."""
MASK = 4
CONFIG = RunConfig(
    model=MODEL,
    objective=ObjectiveConfig(name="retromae"),
    data=DataConfig(sequence_length=LENGTH),
)


def batch() -> Batch:
    """Return two rows, one of them padded, masked twice."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, MODEL.vocab_size, (2, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])
    ids = ids.masked_fill(~mask, 0)
    encoder, decoder = (
        masked(ids, torch.tensor(positions))
        for positions in ([[2, 5], [3, -1]], [[1, 2, 6, 7, 10], [1, 4, 5, 7, -1]])
    )
    return Batch(
        ModelInputs(encoder.input_ids, mask),
        encoder.masked_positions,
        encoder.labels,
        torch.arange(2),
        decoder=decoder,
    )


def masked(ids: Tensor, positions: Tensor) -> DecoderRows:
    labels = torch.where(positions >= 0, ids.gather(1, positions.clamp(min=0)), -100)
    is_masked = (torch.arange(LENGTH) == positions.unsqueeze(-1)).any(1)
    return DecoderRows(ids.masked_fill(is_masked, MASK), positions, labels)


def build(objective: ObjectiveConfig, **model: Any) -> RetroMAEModel:
    config = replace(CONFIG, model=replace(MODEL, **model), objective=objective)
    built = build_objective(config).build_model(RuntimeOptions())
    assert isinstance(built, RetroMAEModel)
    randomize(built)
    return built.double().eval()


def definition(model: RetroMAEModel, rows: Batch, pooling: str) -> tuple[Tensor, Tensor]:
    """Compute both losses from the encoder's outputs, in plain torch."""
    weights = dict(model.named_parameters())

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        size, eps = (MODEL.hidden_size,), MODEL.layer_norm_eps
        return F.layer_norm(x, size, weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    def cross_entropy(logits: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        is_real = positions >= 0
        row = is_real.nonzero()[:, 0]
        return F.cross_entropy(logits[row, positions[is_real]], labels[is_real], reduction="sum")

    table, is_token = weights["embeddings.token.weight"], rows.inputs.is_token
    encoder = cross_entropy(model.masked_logits(rows.inputs), rows.masked_positions, rows.labels)
    states = model.encode(rows.inputs)
    mean = torch.stack([row[real].mean(0) for row, real in zip(states, is_token, strict=True)])
    embedding = mean if pooling == "mean" else states[:, 0]

    assert rows.decoder is not None
    x = norm(table[rows.decoder.input_ids], "embeddings.norm") * is_token.unsqueeze(-1)
    x = torch.cat([embedding.unsqueeze(1), x[:, 1:]], 1)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (MODEL.num_heads, -1)).transpose(-2, -3)

    slots = norm(weights["encoder.relative_positions.weight"], "encoder.relative_positions.norm")
    place = "row_decoder.attention"
    q, k, v = (heads(linear(x, f"{place}.{name}")) for name in ("query", "key", "value"))
    slot_q, slot_k = (heads(linear(slots, f"{place}.{name}")) for name in ("query", "key"))
    steps = torch.arange(LENGTH)
    delta = (steps[:, None] - steps + DISTANCE).clamp(0, 2 * DISTANCE - 1)
    # He et al. 2021, Eq. 4: content to content, content to position, position to content.
    score = torch.stack(
        [
            torch.stack(
                [
                    q[..., i, :] * (k[..., j, :] + slot_k[:, delta[i, j]])
                    + k[..., j, :] * slot_q[:, delta[j, i]]
                    for j in range(LENGTH)
                ],
                -2,
            ).sum(-1)
            for i in range(LENGTH)
        ],
        -2,
    )
    score = score / math.sqrt(3 * MODEL.hidden_size / MODEL.num_heads)
    score = score.masked_fill(~is_token[:, None, None, :], -torch.inf)
    attended = (score.softmax(-1) @ v).transpose(1, 2).flatten(2)
    x = norm(x + linear(attended, f"{place}.output"), f"{place}.norm")
    inner = linear(F.gelu(linear(x, "row_decoder.ffn.up")), "row_decoder.ffn.down")
    x = norm(x + inner, "row_decoder.ffn.norm")
    transformed = norm(F.gelu(linear(x, "head.transform")), "head.norm")
    logits = F.linear(transformed, table, weights["head.bias"])
    return encoder, cross_entropy(logits, rows.decoder.masked_positions, rows.decoder.labels)


@pytest.mark.parametrize(
    ("pooling", "model"),
    [("mean", {}), ("cls", {}), ("mean", {"mask_decoder_passes": 0, "absolute_positions": "none"})],
    ids=["mean", "cls", "no mask decoder"],
)
def test_losses_and_gradients_are_those_of_the_definition(
    pooling: Any, model: dict[str, Any]
) -> None:
    ours = build(ObjectiveConfig(name="retromae", retromae_pooling=pooling), **model)
    rows = batch()
    losses = ours(rows).losses
    found = [losses["masked"].loss, losses["reconstruction"].loss]
    expected = list(definition(ours, rows, pooling))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    parameters = dict(ours.named_parameters())
    for one, other in zip(found, expected, strict=True):
        ours_grad, theirs = (
            torch.autograd.grad(
                loss, list(parameters.values()), allow_unused=True, retain_graph=True
            )
            for loss in (one, other)
        )
        for name, actual, wanted in zip(parameters, ours_grad, theirs, strict=True):
            zero = torch.zeros_like(parameters[name])
            torch.testing.assert_close(
                zero if actual is None else actual,
                zero if wanted is None else wanted,
                rtol=1e-6,
                atol=1e-9,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    alone = ours(replace(rows, decoder=None)).losses
    assert alone.keys() == {"masked"}
    assert torch.equal(alone["masked"].loss, found[0])
    reconstruction = torch.autograd.grad(ours(rows).losses["reconstruction"].loss, [
        parameters["row_decoder.ffn.up.weight"], parameters["encoder.layers.0.ffn.up.weight"]
    ])  # fmt: skip
    assert all(gradient.any() for gradient in reconstruction)


def test_the_decoder_sees_the_row_through_the_embedding_only() -> None:
    """Tokens of the encoder that the decoder has as [MASK] change the decoder's loss."""
    model, rows = build(CONFIG.objective), batch()
    assert rows.decoder is not None
    loss = model(rows).losses["reconstruction"].loss
    ids = rows.inputs.input_ids.clone()
    ids[0, 6] = 9 if ids[0, 6] != 9 else 8
    other = replace(rows, inputs=replace(rows.inputs, input_ids=ids))
    assert model(other).losses["reconstruction"].loss != loss
    # The place of [CLS] has the embedding.
    ids = rows.decoder.input_ids.clone()
    ids[:, 0] = 11
    other = replace(rows, decoder=rows.decoder._replace(input_ids=ids))
    assert model(other).losses["reconstruction"].loss == loss


def test_dropout_of_encoder_and_decoder_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIG.objective).train()
    seeds: list[int] = []
    original = RetroMAEModel.reconstruct

    def noting(self: RetroMAEModel, *arguments: Any) -> Tensor:
        forward = self.embeddings.forward

        def embed(ids: Tensor, tokens: Any, keys: DropoutSeeds) -> Any:
            seeds.append(keys.run_seed)
            return forward(ids, tokens, keys)

        with monkeypatch.context() as patch:
            patch.setattr(self.embeddings, "forward", embed)
            return original(self, *arguments)

    monkeypatch.setattr(RetroMAEModel, "reconstruct", noting)
    keys = DropoutSeeds(7, 2, torch.arange(2))
    first, second = (model(batch(), keys).losses["reconstruction"].loss for _ in range(2))
    assert torch.equal(first, second)
    assert len(set(seeds)) == 1
    assert seeds[0] != 7


def test_validation_measures_both_losses() -> None:
    objective = build_objective(CONFIG)
    model = objective.build_model(RuntimeOptions()).eval()
    rows = batch()
    groups = single_process_groups(torch.device("cpu"))
    evaluation = evaluate(model, [rows], groups, objective)
    assert evaluation is not None
    losses = model(rows).losses
    metrics = evaluation.metrics
    assert metrics["loss"] == pytest.approx(losses["masked"].loss.item() / 3)
    assert metrics["reconstruction_loss"] == pytest.approx(losses["reconstruction"].loss.item() / 9)
    assert metrics["num_targets"] == 3
    assert "reconstruction loss" in objective.describe(metrics)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": ObjectiveConfig(name="retromae", retromae_mask_probability=0.0)},
         "objective.retromae_mask_probability=0 leaves"),
        ({"data": DataConfig(sequence_length=LENGTH, attend_across_documents=False)},
         "data.attend_across_documents=false would hide"),
        ({"model": replace(MODEL, next_sentence_head=True, type_vocab_size=2),
          "data": DataConfig(sequence_length=LENGTH, packing="segment_pair")},
         "objective.name=retromae has no pairs"),
        ({"model": replace(MODEL, head="autoregressive")},
         "objective.name=retromae does not fit model.head=autoregressive"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    short = replace(CONFIG, optimizer=replace(CONFIG.optimizer, warmup_steps=1))
    validate(short)
    with pytest.raises(ConfigError, match=message):
        validate(replace(short, **change))

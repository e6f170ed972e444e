"""Replaced-token detection compared with a restatement on transformers' models, fp32.

Generator (with the released mask decoder) and discriminator are transformers' modules, the tables
are combined and the noise is drawn as the papers' formulas say.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DebertaV2ForMaskedLM

from megatron_deberta.config.schema import (
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    RTDConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.hashing import GOLDEN_GAMMA, MASK64, finalize
from megatron_deberta.model import RuntimeOptions
from megatron_deberta.model.replaced_tokens import discriminator_config, generator_config
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.rtd import ReplacedTokenModel
from megatron_deberta.train.step import TrainStep
from tests.parity.test_model_vs_transformers import BASE, make_batch
from tests.support.stock_weights import (
    copy_from_stock,
    gradients_by_stock_name,
    randomize,
    stock_config,
)
from tests.support.tolerances import FP32_MODEL

GROUPS = single_process_groups(torch.device("cpu"))
SEED = 77
WEIGHT = 50.0
MODEL = replace(BASE, head="rtd", mask_decoder_passes=2, absolute_positions="decoder")
Sharing = Literal["gdes", "es", "none"]


def mix32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def gumbel(seed: int, step: int, sample: int, position: int, piece: int) -> float:
    """Noise of one piece, with Python's integers and floating-point numbers."""
    state = 0
    for part in (seed, step, zlib.crc32(b"rtd.samples"), 0, sample):
        state = finalize((state ^ part) + GOLDEN_GAMMA & MASK64)
    row = mix32(mix32(state & 0xFFFFFFFF ^ 0x9E3779B9) ^ state >> 32)
    row = mix32(mix32(row ^ 0) ^ position)
    word = mix32(row ^ (0x9E3779B9 * piece & 0xFFFFFFFF)) & 0x7FFFFFFF
    return -math.log(-math.log1p(-(word + 0.5) / 2**31))


class Restatement:
    """Losses of both models, from transformers' modules."""

    def __init__(self, model: ReplacedTokenModel, sharing: Sharing) -> None:
        self.sharing = sharing
        self.generator = DebertaV2ForMaskedLM(stock_config(generator_config(MODEL))).eval()
        self.discriminator = DebertaV2ForMaskedLM(stock_config(discriminator_config(MODEL))).eval()
        randomize(self.generator, seed=1)
        randomize(self.discriminator, seed=2)
        copy_from_stock(model.generator, self.generator)
        copy_from_stock(model.discriminator, self.discriminator)
        decoder = model.generator.mask_decoder
        assert decoder is not None
        assert decoder.position is not None
        self.positions = copy_of(decoder.position.weight)
        self.delta = None
        if sharing == "gdes":
            delta = model.get_parameter("discriminator.embeddings.token.delta.weight")
            self.delta = copy_of(delta)
        head = model.discriminator.head
        self.head = {
            name: {leaf: copy_of(p) for leaf, p in part.named_parameters()}
            for name, part in head.named_children()
            if name in ("norm", "dense", "classifier")
        }

    def generator_logits(self, batch: Batch) -> Tensor:
        """Logits at all positions, through the released mask decoder."""
        deberta, mask = self.generator.deberta, batch.inputs.is_token.long()
        encoder = deberta.encoder
        hidden = deberta(batch.inputs.input_ids, mask, output_hidden_states=True).hidden_states[-2]
        query = hidden + self.positions[: hidden.size(1)]
        for _ in range(2):
            query = encoder.layer[-1](
                hidden,
                encoder.get_attention_mask(mask),
                query_states=query,
                relative_pos=encoder.get_rel_pos(hidden),
                rel_embeddings=encoder.get_rel_embedding(),
            )[0]
        logits: Tensor = self.generator.cls(query)
        return logits

    def discriminator_logits(self, batch: Batch, input_ids: Tensor) -> Tensor:
        shared = self.generator.deberta.embeddings.word_embeddings.weight
        tables = {} if self.sharing == "none" else {"embeddings.word_embeddings.weight": shared}
        if self.delta is not None:
            tables = {"embeddings.word_embeddings.weight": shared.detach() + self.delta}
        states = torch.func.functional_call(
            self.discriminator.deberta, tables, (input_ids, batch.inputs.is_token.long())
        )[0]
        head, shape = self.head, states.shape[-1:]
        states = F.layer_norm(states[:, :1] + states, shape, **head["norm"], eps=1e-7)
        states = F.gelu(F.linear(states, **head["dense"]))
        out = F.linear(states, **head["classifier"])
        return out.squeeze(-1)

    def generate(self, batch: Batch, step: int = 0) -> tuple[Tensor, Tensor]:
        """Return the sum of the generator's losses, and the drawn pieces ``[B, M]``, -1 = none."""
        logits = self.generator_logits(batch)
        drawn = torch.full_like(batch.labels, -1)
        loss = torch.zeros(())
        for row, column in (batch.masked_positions >= 0).nonzero().tolist():
            position, label = batch.masked_positions[row, column], batch.labels[row, column]
            scores = logits[row, position]
            loss = loss - scores.log_softmax(-1)[label]
            sample = int(batch.sample_index[row])
            noise = [gumbel(SEED, step, sample, int(position), v) for v in range(MODEL.vocab_size)]
            drawn[row, column] = (scores.detach().double() + torch.tensor(noise)).argmax()
        return loss, drawn

    def detect(self, batch: Batch, drawn: Tensor) -> Tensor:
        """Return the sum of the discriminator's losses."""
        input_ids, is_replaced = (
            batch.inputs.input_ids.clone(),
            torch.zeros_like(batch.inputs.is_token),
        )
        for row, column in (batch.masked_positions >= 0).nonzero().tolist():
            position, piece = batch.masked_positions[row, column], drawn[row, column]
            input_ids[row, position] = piece
            is_replaced[row, position] = piece != batch.labels[row, column]
        detected = self.discriminator_logits(batch, input_ids)
        real = batch.inputs.is_token
        return F.binary_cross_entropy_with_logits(
            detected[real], is_replaced[real].float(), reduction="sum"
        )

    def parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the generator's and the discriminator's."""
        delta = [] if self.delta is None else [self.delta]
        head = [tensor for part in self.head.values() for tensor in part.values()]
        return (
            [*self.generator.parameters(), self.positions],
            [*self.discriminator.parameters(), *delta, *head],
        )


def copy_of(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().clone().requires_grad_()


def build(sharing: Sharing, *, random: bool = True) -> ReplacedTokenModel:
    config = RunConfig(
        model=replace(MODEL, embedding_sharing=sharing),
        objective=ObjectiveConfig(name="rtd"),
        train=TrainConfig(seed=SEED),
    )
    model = build_objective(config).build_model(RuntimeOptions(attention_backend="reference"))
    assert isinstance(model, ReplacedTokenModel)
    if random:
        randomize(model, seed=5)
    return model


def gradients(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}


def close(actual: Tensor | None, expected: Tensor | None, name: str) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, expected, **FP32_MODEL, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("sharing", ["gdes", "es", "none"])
def test_losses_and_gradients(sharing: Sharing) -> None:
    model = build(sharing)
    restated = Restatement(model, sharing)
    batch = make_batch(MODEL, 37, padded=True)
    result = model(batch)
    loss, detection = (result.losses[name].loss for name in ("generator", "discriminator"))
    expected_loss, drawn = restated.generate(batch)
    expected_detection = restated.detect(batch, drawn)
    valid = batch.masked_positions >= 0
    assert torch.equal(result.outputs[valid], drawn[valid])
    assert int(result.counts["replaced"]) == int((drawn[valid] != batch.labels[valid]).sum()) > 0
    torch.testing.assert_close(loss, expected_loss, **FP32_MODEL)
    torch.testing.assert_close(detection, expected_detection, **FP32_MODEL)

    (loss + WEIGHT * detection).backward()
    (expected_loss + WEIGHT * expected_detection).backward()
    for ours, stock in (
        (model.generator, restated.generator),
        (model.discriminator, restated.discriminator),
    ):
        expected = gradients(dict(stock.named_parameters()))
        actual = gradients_by_stock_name(ours)
        if ours is model.discriminator:
            # Its head has names of the masked language model's.
            actual = {name: grad for name, grad in actual.items() if name.startswith("deberta.")}
        assert actual.keys() == expected.keys() - {"cls.predictions.decoder.bias"}
        for name, grad in actual.items():
            close(grad, expected[name], name)
    assert model.generator.mask_decoder is not None
    assert model.generator.mask_decoder.position is not None
    close(model.generator.mask_decoder.position.weight.grad, restated.positions.grad, "positions")
    if restated.delta is not None:
        delta = model.get_parameter("discriminator.embeddings.token.delta.weight")
        close(delta.grad, restated.delta.grad, "delta")
    for part, tensors in restated.head.items():
        for name, tensor in tensors.items():
            parameter = model.get_parameter(f"discriminator.head.{part}.{name}")
            close(parameter.grad, tensor.grad, f"{part}.{name}")


@pytest.mark.parametrize("sharing", ["gdes", "none"])
def test_alternating_updates(sharing: Sharing) -> None:
    """Four steps: the generator's, then the discriminator's with the updated table."""
    rates, clip, weight = (1e-2, 1e-3), 0.5, 10.0
    config = RunConfig(
        model=replace(
            MODEL, embedding_sharing=sharing, hidden_dropout=0.0, attention_dropout=0.0
        ),
        objective=ObjectiveConfig(name="rtd"),
        rtd=RTDConfig(
            update="alternating", discriminator_learning_rate=rates[1], discriminator_weight=weight
        ),
        optimizer=OptimizerConfig(
            learning_rate=rates[0], warmup_steps=0, schedule="constant", eps=1e-4,
            weight_decay=0.0, clip_grad_norm=clip,
        ),
        parallel=ParallelConfig(engine="plain"),
        train=TrainConfig(seed=SEED, global_batch_size=3, micro_batch_size=3),
    )  # fmt: skip
    model = build_objective(config).build_model(RuntimeOptions())
    assert isinstance(model, ReplacedTokenModel)
    randomize(model, seed=5)
    restated = Restatement(model, sharing)
    engine = build_engine(config, model, build_model(config, GROUPS).specs, GROUPS)
    take_step = TrainStep(engine, config, GROUPS)
    parameters = restated.parameters()
    optimizers = [
        torch.optim.Adam(tensors, rate, eps=1e-4)
        for tensors, rate in zip(parameters, rates, strict=True)
    ]
    for step in range(4):
        batch = make_batch(MODEL, 21, padded=True)
        batch = replace(batch, sample_index=batch.sample_index + 10 * step)
        result = take_step(step, [batch])
        loss, drawn = restated.generate(batch, step)
        mean = loss / (batch.labels >= 0).sum()
        with torch.no_grad():
            stale = float(restated.detect(batch, drawn) / batch.inputs.is_token.sum())
        detection, norms = torch.zeros(()), []
        for number, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            if number:
                detection = restated.detect(batch, drawn) / batch.inputs.is_token.sum()
            (weight * detection if number else mean).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters[number], clip)))
            optimizer.step()
        metrics = result.metrics
        assert result.loss == pytest.approx(mean.item(), rel=1e-5)
        assert metrics["discriminator_loss"] == pytest.approx(detection.item(), rel=1e-5)
        assert result.outcome.grad_norm == pytest.approx(norms[0], rel=1e-3)
        assert metrics["discriminator_grad_norm"] == pytest.approx(norms[1], rel=1e-3)
        assert (result.learning_rate, metrics["discriminator_learning_rate"]) == rates
        if sharing == "gdes":
            # The table of the step before gives another loss.
            assert metrics["discriminator_loss"] != pytest.approx(stale, rel=3e-4)
    table = restated.generator.deberta.embeddings.word_embeddings.weight
    torch.testing.assert_close(model.generator.embeddings.token.weight, table, rtol=1e-3, atol=1e-4)
    if restated.delta is not None:
        delta = model.get_parameter("discriminator.embeddings.token.delta.weight")
        torch.testing.assert_close(delta, restated.delta, rtol=1e-3, atol=1e-4)


def test_delta_starts_at_zero() -> None:
    names = {
        sharing: dict(build(sharing, random=False).named_parameters())
        for sharing in ("gdes", "es", "none")
    }
    delta = names["gdes"].pop("discriminator.embeddings.token.delta.weight")
    assert not delta.any()
    assert names["gdes"].keys() == names["es"].keys()
    own = names["none"].keys() - names["es"].keys()
    assert own == {"discriminator.embeddings.token.weight"}
    assert not torch.equal(
        names["none"]["discriminator.encoder.layers.0.ffn.up.weight"],
        names["none"]["generator.encoder.layers.0.ffn.up.weight"],
    )

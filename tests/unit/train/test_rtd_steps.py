"""Training steps, validation and resumption of replaced-token detection in one process."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_deberta.checkpoint import store
from megatron_deberta.checkpoint.reader import CheckpointReader, Slice
from megatron_deberta.checkpoint.views import open_part
from megatron_deberta.config import validate
from megatron_deberta.config.schema import (
    DataConfig,
    ObjectiveConfig,
    RTDConfig,
    RunConfig,
)
from megatron_deberta.distributed.parallelize import ShardedModel, build_model
from megatron_deberta.engine.base import Engine
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.evaluate.validation import evaluate
from megatron_deberta.model import DropoutSeeds, RuntimeOptions
from megatron_deberta.model.replaced_tokens import DELTA, DISCRIMINATOR, GENERATOR, TOKENS
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.rtd import ReplacedTokenModel, fill
from megatron_deberta.train.step import TrainStep
from tests.support.checkpoints import metadata, save_state
from tests.support.toy_engine import states
from tests.unit.train.test_step import CONFIG, GROUPS, SPLITS, part, rows, start

RTD = replace(
    CONFIG,
    model=replace(CONFIG.model, head="rtd"),
    objective=ObjectiveConfig(name="rtd"),
    data=DataConfig(sequence_length=64),
)
ALTERNATING = replace(RTD, rtd=RTDConfig(update="alternating", discriminator_learning_rate=5e-4))
MODES = pytest.mark.parametrize("config", [RTD, ALTERNATING], ids=["joint", "alternating"])


def losses(
    take_step: TrainStep, steps: range, split: list[tuple[int, int]] | None = None
) -> list[float]:
    values = []
    for step in steps:
        batch = rows(4 * step)
        result = take_step(step, [part(batch, *bounds) for bounds in split or SPLITS["whole"]])
        values += [result.loss, result.metrics["discriminator_loss"], result.outcome.grad_norm]
    return values


@MODES
def test_micro_batches_and_recomputation_do_not_change_the_objective(config: RunConfig) -> None:
    expected = losses(start(config)[2], range(3))
    assert len(set(expected)) == 9
    for split in SPLITS.values():
        assert losses(start(config)[2], range(3), split) == pytest.approx(expected, rel=1e-5)
    for recompute in ("selective", "full"):
        changed = replace(config, parallel=replace(config.parallel, recompute=recompute))  # type: ignore[arg-type]
        assert losses(start(changed)[2], range(3)) == pytest.approx(expected, rel=1e-6)


def test_weight_of_the_discriminator() -> None:
    """The gradient is that of the generator's mean plus the weighted mean of the other's."""
    model, _, _ = start(RTD)
    module, batch = model.module, rows()
    objective = build_objective(replace(RTD, rtd=RTDConfig(discriminator_weight=3.0)))
    weights = {name: term.weight for name, term in objective.losses.items()}
    assert weights == {"generator": 1.0, "discriminator": 3.0}
    targets = {name: int(count) for name, count in objective.count_targets(batch).items()}
    assert targets == {"generator": 10, "discriminator": 48}
    result = module(batch, None)
    assert result.losses.keys() == weights.keys()
    assert tuple(result.counts) == objective.counters


def test_a_drawn_original_is_not_replaced() -> None:
    """Clark et al. 2020 (ELECTRA): the label of such a token is "original"."""
    model, _, _ = start(RTD)
    module, batch = model.module, rows()
    assert isinstance(module, ReplacedTokenModel)
    targets = batch.masked_positions >= 0
    drawn = batch.labels.clone()
    counts = [int(module.detect(batch, drawn, None).counts["replaced"])]
    for row, slot in targets.nonzero().tolist()[:3]:
        drawn[row, slot] = 5 + (drawn[row, slot] - 4) % (RTD.model.vocab_size - 5)
        counts.append(int(module.detect(batch, drawn, None).counts["replaced"]))
    assert int(targets.sum()) == 10
    assert counts == [0, 1, 2, 3]


def test_both_models_have_dropout_bits_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = start(RTD)
    module, batch = model.module, rows()
    assert isinstance(module, ReplacedTokenModel)
    per_row, used = DropoutSeeds.per_row, defaultdict[int, list[tuple[int, ...]]](list)

    def note(self: DropoutSeeds, site: int) -> Tensor:
        seeds = per_row(self, site)
        used[site].append(tuple(seeds.tolist()))
        return seeds

    monkeypatch.setattr(DropoutSeeds, "per_row", note)
    module(batch, DropoutSeeds(3, 5, batch.sample_index))
    shared = [seeds for seeds in used.values() if len(seeds) > 1]
    assert len(shared) >= 3
    assert all(len(set(seeds)) == len(seeds) for seeds in shared)


def saved(run_dir: Path, model: ShardedModel, engine: Engine) -> Path:
    return save_state(run_dir, engine, model.specs, GROUPS, metadata(3, RTD))


@MODES
def test_resumed_run_is_bit_identical(tmp_path: Path, config: RunConfig) -> None:
    whole = start(config)
    expected = losses(whole[2], range(5))
    _, engine, take_step = start(config)
    first = losses(take_step, range(3))
    path = saved(tmp_path, whole[0], engine)
    again = start(config)
    store.load(CheckpointReader(path), again[1], again[0].specs)
    assert first + losses(again[2], range(3, 5)) == expected
    pairs = zip(states(whole[1]).items(), states(again[1]).items(), strict=True)
    for (name, theirs), (_, ours) in pairs:
        assert torch.equal(theirs.weight, ours.weight), name
        assert torch.equal(theirs.exp_avg_sq, ours.exp_avg_sq), name


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return {name: state.weight.clone() for name, state in states(engine).items()}


@MODES
def test_frozen_parameters_are_named_alike_in_both_modes(config: RunConfig) -> None:
    frozen = ("generator.embeddings", "discriminator.head.dense.bias")
    _, engine, take_step = start(frozen_in(config, *frozen))
    before = weights_of(engine)
    losses(take_step, range(2))
    kept = {n for n, weight in weights_of(engine).items() if torch.equal(weight, before[n])}
    assert kept == {n for n in before if n.startswith((f"{frozen[0]}.", frozen[1]))}
    with pytest.raises(ConfigError, match=r"optimizer.freeze=generator.absent: no parameter"):
        start(frozen_in(config, "generator.absent"))


def frozen_in(config: RunConfig, *names: str) -> RunConfig:
    return replace(config, optimizer=replace(config.optimizer, freeze=names))


def test_a_whole_model_is_frozen_under_alternating_updates() -> None:
    _, engine, take_step = start(frozen_in(ALTERNATING, "discriminator"))
    before = weights_of(engine)
    losses(take_step, range(2))
    changed = {n for n, weight in weights_of(engine).items() if not torch.equal(weight, before[n])}
    assert changed
    assert all(name.startswith(GENERATOR) for name in changed)


def test_update_that_is_skipped_skips_the_discriminator_too() -> None:
    model, engine, take_step = start(ALTERNATING)
    losses(take_step, range(1))
    before = weights_of(engine)
    with torch.no_grad():
        model.module.get_parameter("generator.head.bias")[3] = math.nan
    result = take_step(1, [rows(4)])
    assert result.skip == "loss not finite"
    after = weights_of(engine)
    del before["generator.head.bias"]
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_infinite_gradient_of_the_discriminator_skips_its_update_only() -> None:
    model, engine, take_step = start(ALTERNATING)
    losses(take_step, range(1))
    before = weights_of(engine)
    bias = model.module.get_parameter("discriminator.head.dense.bias")
    handle = bias.register_hook(lambda gradient: gradient * math.inf)
    result = take_step(1, [rows(4)])
    assert result.skip == "gradient not finite"
    assert math.isfinite(result.outcome.grad_norm)
    assert not math.isfinite(result.metrics["discriminator_grad_norm"])
    changed = {
        name for name, weight in weights_of(engine).items() if (weight != before[name]).any()
    }
    assert changed
    assert all(name.startswith(GENERATOR) for name in changed)
    handle.remove()
    assert take_step(2, [rows(8)]).skip is None


def test_joint_engine_state_does_not_fit_alternating_updates() -> None:
    with pytest.raises(CheckpointError, match="lacks 'adam_step'"):
        start(ALTERNATING)[1].load_state_dict(start(RTD)[1].state_dict())


def test_checkpoint_holds_both_models(tmp_path: Path) -> None:
    model, engine, take_step = start(RTD)
    losses(take_step, range(2))
    reader = CheckpointReader(saved(tmp_path, model, engine))
    weights = {name: state.weight for name, state in states(engine).items()}
    delta = weights[DISCRIMINATOR + DELTA]
    assert delta.any()
    config, generator = open_part(reader, RTD.model, "generator")
    assert (config.head, config.num_layers) == ("mlm", RTD.model.num_layers // 2)
    assert torch.equal(
        generator.tensor("head.bias"),
        model.specs[GENERATOR + "head.bias"].true_part(weights[GENERATOR + "head.bias"]),
    )
    config, discriminator = open_part(reader, RTD.model, "discriminator")
    assert (config.head, config.num_layers) == ("discriminator", RTD.model.num_layers)
    table = (weights[GENERATOR + TOKENS] + delta)[: config.vocab_size]
    assert torch.equal(discriminator.tensor(TOKENS), table)
    assert torch.equal(discriminator.tensor(TOKENS, part=Slice(0, 3, 9)), table[3:9])
    assert TOKENS in discriminator.shapes
    assert DELTA not in discriminator.shapes


def test_validation_metrics_are_those_of_the_predictions() -> None:
    model, _, take_step = start(RTD)
    losses(take_step, range(2))
    module, batches = model.module, [rows(100), part(rows(200), 0, 3)]
    assert isinstance(module, ReplacedTokenModel)
    evaluation = evaluate(module, batches, GROUPS, build_objective(RTD))
    assert evaluation is not None
    said, truth, missed = [], [], []
    module.eval()
    for batch in batches:
        with torch.no_grad():
            result = module(batch, None)
            ids = fill(batch.inputs.input_ids, batch.masked_positions, result.outputs)
            logits = module.discriminator.logits(replace(batch.inputs, input_ids=ids))
        original = fill(batch.inputs.input_ids, batch.masked_positions, batch.labels)
        said.append((logits > 0).flatten())
        truth.append((ids != original).flatten())
        missed.append(torch.nn.functional.softplus(torch.where(ids != original, -logits, logits)))
    found, is_replaced = torch.cat(said), torch.cat(truth)
    hits = int((found & is_replaced).sum())
    metrics = evaluation.metrics
    assert metrics["discriminator_accuracy"] == pytest.approx(
        float((found == is_replaced).double().mean())
    )
    assert metrics["discriminator_recall"] == pytest.approx(hits / int(is_replaced.sum()))
    assert metrics["discriminator_precision"] == pytest.approx(hits / max(int(found.sum()), 1))
    assert metrics["replaced_fraction"] == pytest.approx(float(is_replaced.double().mean()))
    assert metrics["discriminator_loss"] == pytest.approx(
        float(torch.cat([m.flatten() for m in missed]).mean()), rel=1e-5
    )
    assert {"loss", "perplexity", "masked_accuracy", "discriminator_f1"} <= metrics.keys()
    assert f"recall {metrics['discriminator_recall']:.1%}" in evaluation.text
    again = evaluate(module, batches, GROUPS, build_objective(RTD))
    assert again == evaluation


def test_special_tokens_are_drawn_only_if_allowed() -> None:
    objective = build_objective(RTD)
    assert objective.complete_config((0, 1, 2)) is RTD
    closed = replace(RTD, rtd=RTDConfig(draw_special_tokens=False))
    with pytest.raises(ConfigError, match="rtd.excluded_ids is empty"):
        build_objective(closed).build_model(RuntimeOptions())
    allowed = tuple(range(20, 30))
    others = tuple(set(range(RTD.model.vocab_size)) - set(allowed))
    completed = build_objective(closed).complete_config(others)
    assert completed.rtd.excluded_ids == others
    batch = rows()
    samples: Tensor = build_model(completed, GROUPS).module(batch, None).outputs
    assert set(samples[batch.masked_positions >= 0].tolist()) <= set(allowed)
    free: Tensor = build_model(RTD, GROUPS).module(batch, None).outputs
    assert not set(free[batch.masked_positions >= 0].tolist()) <= set(allowed)


def test_bf16_trains() -> None:
    config = replace(RTD, precision=replace(RTD.precision, dtype="bf16"))
    values = losses(start(config, torch.bfloat16)[2], range(3))
    assert values == pytest.approx(losses(start(RTD)[2], range(3)), rel=0.05)


def test_fp16_has_a_loss_scale_of_each_model() -> None:
    """Overflows in the discriminator lower its own scale only, and skip its update only."""
    parallel = replace(RTD.parallel, engine="deepspeed")
    precision = replace(RTD.precision, dtype="fp16", initial_loss_scale_power=8)
    config = replace(ALTERNATING, parallel=parallel, precision=precision)
    model, engine, take_step = start(config, torch.float16)
    values = losses(take_step, range(2))
    assert values == pytest.approx(losses(start(ALTERNATING)[2], range(2)), rel=0.05)
    before = weights_of(engine)
    bias = model.module.get_parameter("discriminator.head.dense.bias")
    handle = bias.register_hook(lambda gradient: gradient * math.inf)
    # The first of two has no effect on a loss scale.
    for step in (2, 3):
        result = take_step(step, [rows(4 * step)])
        assert not math.isfinite(result.metrics["discriminator_grad_norm"])
    handle.remove()
    changed = {n for n, weight in weights_of(engine).items() if not weight.equal(before[n])}
    assert changed
    assert all(name.startswith(GENERATOR) for name in changed)
    result = take_step(4, [rows(16)])
    assert result.outcome.loss_scale == 256
    assert result.metrics["discriminator_loss_scale"] == 128
    engine.destroy()


def of_model(**keys: Any) -> RunConfig:
    return replace(RTD, model=replace(RTD.model, **keys))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (of_model(type_vocab_size=2), "model.head=rtd has no segments"),
        (of_model(absolute_positions="input"), "shares no absolute positions"),
        (of_model(head="mlm", generator_layers=3), "objective.name=rtd does not fit"),
        (replace(ALTERNATING, model=replace(RTD.model, embedding_sharing="es")),
         "rtd.update=alternating cannot train the one table"),
        (replace(RTD, rtd=RTDConfig(discriminator_learning_rate=0.1)),
         "rtd.discriminator_learning_rate=0.1 needs rtd.update"),
        (replace(of_model(head="mlm", generator_layers=3), objective=ObjectiveConfig()),
         "model.generator_layers=3 needs model.head=rtd"),
        (replace(of_model(head="discriminator"), objective=ObjectiveConfig(name="discriminator")),
         "objective.name=discriminator is no training task"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(config: RunConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(config)

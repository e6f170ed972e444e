"""The objective of a step does not depend on how its rows are spread; bad losses stop it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_deberta.config.schema import (
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    StabilityConfig,
    TrainConfig,
)
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.parallelize import ShardedModel, build_model
from megatron_deberta.distributed.topology import ProcessGroups, single_process_groups
from megatron_deberta.engine.base import Engine, ReadNorm, StepOutcome
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.errors import NumericsError
from megatron_deberta.evaluate.validation import evaluate
from megatron_deberta.model import DropoutSeeds
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import LossSums, ModelLosses, build_objective
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL
from megatron_deberta.train.step import TrainStep
from tests.support.tiny_models import V2
from tests.support.tolerances import FP32_MODULE
from tests.support.toy_engine import states

GROUPS = single_process_groups(torch.device("cpu"))
CONFIG = RunConfig(
    model=V2,
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2),
    parallel=ParallelConfig(engine="plain"),
    train=TrainConfig(steps=10, global_batch_size=4, micro_batch_size=4),
)


STRICT = replace(CONFIG, stability=StabilityConfig(non_finite="stop"))


def rows(first: int = 0) -> Batch:
    """Four rows with one, two, three and four targets."""
    generator = torch.Generator().manual_seed(first)
    positions = torch.arange(4).expand(4, 4).clone()
    labels = torch.randint(5, V2.vocab_size, (4, 4), generator=generator)
    absent = torch.ones(4, 4, dtype=torch.bool).triu(1)
    return Batch(
        ModelInputs(
            torch.randint(5, V2.vocab_size, (4, 12), generator=generator),
            torch.ones(4, 12, dtype=torch.bool),
        ),
        masked_positions=positions.masked_fill(absent, -1),
        labels=labels.masked_fill(absent, IGNORED_LABEL),
        sample_index=torch.arange(first, first + 4),
    )


def part(batch: Batch, begin: int, end: int) -> Batch:
    return batch._map(lambda tensor: tensor[begin:end])


def start(
    config: RunConfig = CONFIG, dtype: torch.dtype = torch.float32
) -> tuple[ShardedModel, Engine, TrainStep]:
    """Return the model of a run, its engine and its steps."""
    model = build_model(config, GROUPS, dtype)
    engine = build_engine(config, model.module, model.specs, GROUPS)
    return model, engine, TrainStep(engine, config, GROUPS)


def validated(
    model: ShardedModel, batches: list[Batch], config: RunConfig = CONFIG
) -> dict[str, float]:
    evaluation = evaluate(model.module, batches, GROUPS, build_objective(config))
    assert evaluation is not None
    return evaluation.metrics


def trained(split: Sequence[tuple[int, int]]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps and the weights after them, dropout on."""
    _, engine, step = start()
    losses = []
    for number in range(3):
        batch = rows(4 * number)
        losses.append(step(number, [part(batch, *bounds) for bounds in split]).loss)
    return losses, {name: state.weight for name, state in states(engine).items()}


SPLITS = {"whole": [(0, 4)], "halves": [(0, 2), (2, 4)], "uneven": [(0, 1), (1, 4)]}


@pytest.mark.parametrize("split", [SPLITS["halves"], SPLITS["uneven"], [(3, 4), (0, 3)]])
def test_micro_batches_with_unequal_targets_change_nothing(split: list[tuple[int, int]]) -> None:
    losses, weights = trained([(0, 4)])
    others, other_weights = trained(split)
    assert others == pytest.approx(losses, rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(other_weights[name], weight, **FP32_MODULE)


def test_loss_is_the_mean_over_targets() -> None:
    config = replace(CONFIG, model=replace(V2, hidden_dropout=0.0, attention_dropout=0.0))
    model, _, take_step = start(config)
    expected = validated(model, [rows()])
    result = take_step(0, [rows()])
    assert expected["num_targets"] == 10
    assert result.loss == pytest.approx(expected["loss"], rel=1e-6)
    assert result.learning_rate == CONFIG.optimizer.learning_rate / 2


def test_validation_has_no_dropout_and_counts_no_fillers() -> None:
    model = build_model(CONFIG, GROUPS)
    batch = rows()
    filler = replace(
        part(batch, 0, 1),
        masked_positions=torch.full((1, 4), -1),
        labels=torch.full((1, 4), IGNORED_LABEL),
        sample_index=torch.tensor([-1]),
    )
    once = validated(model, [batch])
    left = [False, True]
    objective = build_objective(CONFIG)
    stopped = evaluate(model.module, [batch, batch], GROUPS, objective, lambda: left.pop(0))
    assert stopped is None
    assert model.module.training
    split = validated(model, [part(batch, 0, 3), part(batch, 3, 4), filler])
    assert split["num_targets"] == once["num_targets"] == 10
    assert split["loss"] == pytest.approx(once["loss"], rel=1e-6)
    assert split["masked_accuracy"] == once["masked_accuracy"]
    assert once["perplexity"] == pytest.approx(math.exp(once["loss"]), rel=1e-5)
    assert model.module.training


def losses_of(loss: float) -> ModelLosses:
    return ModelLosses({"masked": LossSums(torch.tensor(loss), torch.tensor(0))})


class Recorded:
    """An engine that notes what it is asked, over a module that returns a given loss."""

    def __init__(self, loss: float, outcome: StepOutcome | None = None) -> None:
        self.loss = loss
        self.outcome = outcome or StepOutcome(1.0, False, 1.0)
        self.calls: list[str] = []
        self.module = torch.nn.Module()
        self.module.forward = self._forward  # type: ignore[method-assign]

    def _forward(self, *args: Any, **kwargs: Any) -> ModelLosses:
        return losses_of(self.loss)

    @property
    def parts(self) -> tuple[Recorded, ...]:
        return (self,)

    def backward(self, loss: Tensor) -> None:
        self.calls.append("backward")

    def step(self, rate: float, read: ReadNorm) -> StepOutcome:
        _, norm_limit = read(torch.tensor(1.0))
        self.calls.append("step" if norm_limit > 0 else "skip")
        return self.outcome


def step_of(engine: Any, config: RunConfig = CONFIG, groups: ProcessGroups = GROUPS) -> TrainStep:
    typed: Engine = engine
    return TrainStep(typed, config, groups)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_stops_before_the_update(
    loss: float, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Recorded(loss)
    with pytest.raises(NumericsError, match=r"step 8: the loss is not finite; .* of step 7"):
        step_of(engine, STRICT)(7, [rows(40)])
    assert engine.calls == ["backward", "skip"]
    assert "[40, 41, 42, 43]" in caplog.text


def test_the_next_batches_are_fetched_while_the_device_has_all_of_the_step() -> None:
    engine = Recorded(1.0)
    step_of(engine)(0, [rows(), rows(4)], lambda: engine.calls.append("fetch"))
    assert engine.calls == ["backward", "backward", "fetch", "step"]


def test_a_gradient_that_is_not_finite_stops_too_but_in_fp16_lowers_the_scale() -> None:
    skipped = StepOutcome(float("inf"), True, 1.0)
    with pytest.raises(NumericsError, match="step 1: a gradient is not finite"):
        step_of(Recorded(1.0, skipped), STRICT)(0, [rows()])
    fp16 = replace(CONFIG, precision=replace(CONFIG.precision, dtype="fp16"))
    result = step_of(Recorded(1.0, skipped), fp16)(0, [rows()])
    assert (result.outcome, result.skip) == (skipped, "overflow")


def test_dropout_has_the_seeds_of_its_step() -> None:
    engine = Recorded(1.0)
    config = replace(CONFIG, train=replace(CONFIG.train, seed=17))
    seen: list[tuple[int, int, list[int]]] = []

    def forward(batch: Batch, seeds: DropoutSeeds) -> ModelLosses:
        assert isinstance(seeds.step, Tensor)  # no constant of the recorded operations
        seen.append((seeds.run_seed, int(seeds.step), seeds.samples.tolist()))
        return losses_of(1.0)

    engine.module.forward = forward  # type: ignore[method-assign]
    for number in (0, 1):
        step_of(engine, config)(number, [rows(4 * number)])
    assert seen == [(17, 0, [0, 1, 2, 3]), (17, 1, [4, 5, 6, 7])]


def test_the_sum_of_all_ranks_is_divided_by_the_targets_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four data-parallel ranks with equal rows: the engine averages gradients over them."""
    given: list[float] = []
    engine = Recorded(7.0)
    monkeypatch.setattr(engine, "backward", lambda loss: given.append(loss.item()))
    monkeypatch.setattr(
        "megatron_deberta.train.step.sum_over_batch_ranks", lambda numbers, _: 4 * numbers
    )
    result = step_of(engine, groups=replace(GROUPS, dp_size=4))(0, [rows()])
    # 10 targets on each rank.
    assert given == [pytest.approx(4 * 7.0 / 40)]
    assert result.loss == pytest.approx(4 * 7.0 / 40)

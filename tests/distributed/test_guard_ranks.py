"""All ranks skip harmful updates together, on every layout and engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_deberta.config.schema import StabilityConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.engine import deepspeed_engine
from megatron_deberta.engine.schedule import learning_rate
from megatron_deberta.errors import EXIT_NEVER_REQUEUE, LossScaleError
from megatron_deberta.objectives import ModelLosses
from megatron_deberta.train.stability.guard import Guard
from megatron_deberta.train.step import TrainStep
from tests.support.layout_matrix import (
    GLOBAL_BATCH,
    Layout,
    build,
    groups_of,
    micro_batches,
    run_config,
)
from tests.support.losses import with_first_loss
from tests.support.ranks import RankPool, grid
from tests.support.selection import every
from tests.support.tolerances import LAYOUT_LOSS
from tests.support.toy_engine import (
    MICRO_BATCHES,
    TOTAL_STEPS,
    assert_same_states,
    micro_batch,
    start,
    states,
    toy_config,
    train,
)

ENGINES = [
    ("plain", "fp32", 0),
    ("plain", "fp16", 0),
    *(("deepspeed", d, s) for d in ("fp32", "bf16", "fp16") for s in range(4) if s or d == "fp32"),
]
FEW = {
    ("plain", "fp32", 0),
    ("deepspeed", "fp32", 3),
    ("deepspeed", "bf16", 1),
    ("deepspeed", "fp16", 2),
}


def step_without_update(rank: int, tp_size: int, name: str, dtype: str, stage: int) -> None:
    """Check that a skipped step changes no state."""
    groups = grid(tp_size)
    deepspeed_engine.PERSISTENCE_THRESHOLD = 0
    config = toy_config(name, dtype, stage, dp_size=groups.dp_size)
    probe = start(config, groups)
    train(probe, config, groups, range(1))
    (expected, _), *_ = train(probe, config, groups, range(1, 2))
    updated = states(probe)
    probe.destroy()

    engine = start(config, groups)
    train(engine, config, groups, range(1))
    before = states(engine)
    # The limits below the norm are first: the same step is taken after it was skipped twice.
    for limit in (0.99 * expected.grad_norm, -float("inf"), 1.01 * expected.grad_norm):
        for index in range(MICRO_BATCHES):
            loss = engine.module(micro_batch(1, index, groups))
            engine.backward(loss / MICRO_BATCHES)
        outcome = engine.step(learning_rate(1, config.optimizer, TOTAL_STEPS), limit)
        assert outcome.skipped is (limit < expected.grad_norm)
        assert outcome.grad_norm == expected.grad_norm
        assert outcome.loss_scale == expected.loss_scale
        assert_same_states(states(engine), before if outcome.skipped else updated)
    assert engine.state_dict()["adam_step"] == 2
    engine.destroy()


@pytest.mark.parametrize(
    ("name", "dtype", "stage"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.slow) for case in ENGINES],
)
def test_norm_above_the_limit_changes_nothing(
    two_ranks: RankPool, name: str, dtype: str, stage: int
) -> None:
    two_ranks.run(step_without_update, 1 + stage % 2, name, dtype, stage)


GUARD = StabilityConfig(spike_window=8, spike_warmup=3, max_skips=9)
LOSS_SPIKE, GRADIENT_SPIKE, NOT_A_NUMBER = 4, 6, 8
SKIPS = {
    LOSS_SPIKE: "loss spike",
    GRADIENT_SPIKE: "gradient spike",
    NOT_A_NUMBER: "loss not finite",
}
STEPS = 10


class LossFault:
    """A forward hook that corrupts the loss of one sample of a step, on its rank."""

    def __init__(self, step: int, batches: Sequence[Batch]) -> None:
        self.step = step
        self.left = iter(batches)

    def __call__(self, module: Any, args: Any, out: ModelLosses) -> ModelLosses:
        if self.step * GLOBAL_BATCH + 3 not in next(self.left).sample_index.tolist():
            return out
        return with_first_loss(out, self.corrupted)

    def corrupted(self, loss: Tensor) -> Tensor:
        if self.step == LOSS_SPIKE:
            return loss * 100
        if self.step == GRADIENT_SPIKE:
            return loss * 1000 - (loss * 999).detach()
        return loss * float("nan") if self.step == NOT_A_NUMBER else loss


def train_with_faults(rank: int, layout: Layout | None) -> dict[str, Any]:
    """Return losses and skips of a run."""
    config = replace(run_config(layout), stability=GUARD)
    groups = groups_of(layout)
    _, engine = build(config, groups)
    guard, history = Guard.of_run(config), []
    for step in range(STEPS):
        batches = micro_batches(step, groups)
        hook = engine.module.register_forward_hook(LossFault(step, batches))
        result = TrainStep(engine, config, groups, guard)(step, batches)
        hook.remove()
        history.append((result.loss, result.outcome.grad_norm, result.skip))
    scalars = engine.state_dict()
    engine.destroy()
    return {"history": history, "adam_step": scalars["adam_step"]}


@pytest.fixture(scope="module")
def single_process() -> dict[str, Any]:
    return train_with_faults(0, None)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(1, 1, False, "none"), marks=pytest.mark.nightly),
        pytest.param(Layout(2, 2, True, "none"), marks=pytest.mark.slow),
        pytest.param(Layout(4, 3, False, "none"), marks=pytest.mark.nightly),
    ],
    ids=lambda layout: layout.name,
)
def test_all_layouts_skip_the_same_steps(
    four_ranks: RankPool, single_process: dict[str, Any], layout: Layout
) -> None:
    expected = single_process["history"]
    assert {n: skip for n, (*_, skip) in enumerate(expected) if skip} == SKIPS
    assert single_process["adam_step"] == STEPS - len(SKIPS)
    for rank in four_ranks.run(train_with_faults, layout):
        for (loss, _, skip), (expected_loss, _, expected_skip) in zip(
            rank["history"], expected, strict=True
        ):
            assert skip == expected_skip
            assert loss == pytest.approx(expected_loss, rel=LAYOUT_LOSS, nan_ok=True)
        assert rank["adam_step"] == single_process["adam_step"]


class _Poison(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("inf")


def overflow_at_the_floor(rank: int, tp_size: int, engine_name: str, stage: int) -> tuple[str, int]:
    """Make rank 1's gradients overflow in one layer, at the smallest loss scale."""
    config = run_config(Layout(tp_size, stage, False, "none"))
    parallel = replace(config.parallel, engine=engine_name)  # type: ignore[arg-type]
    fp16 = replace(config.precision, dtype="fp16", initial_loss_scale_power=0)
    config = replace(config, parallel=parallel, precision=fp16)
    groups = grid(tp_size)
    _, engine = build(config, groups)
    if rank == 1:
        layer = engine.module.get_submodule("encoder.layers.0.ffn.down")
        layer.register_forward_hook(lambda _, __, out: _Poison.apply(out))
    take = TrainStep(engine, config, groups)
    try:
        # The hysteresis tolerates the first overflow.
        assert take(0, micro_batches(0, groups)).skip == "overflow"
        take(1, micro_batches(1, groups))
    except LossScaleError as error:
        return str(error), error.exit_code
    finally:
        engine.destroy()
    return "went on", 0


@pytest.mark.parametrize(
    ("tp_size", "engine_name", "stage"),
    every(
        3,
        [
            (1, "plain", 1),
            (1, "deepspeed", 1),
            (1, "deepspeed", 3),
            (2, "deepspeed", 2),
            (2, "plain", 1),
        ],
        ["slow"],
    ),
)
def test_overflow_at_the_smallest_scale_names_parameter_and_rank(
    two_ranks: RankPool, tp_size: int, engine_name: str, stage: int
) -> None:
    for message, code in two_ranks.run(overflow_at_the_floor, tp_size, engine_name, stage):
        assert code == EXIT_NEVER_REQUEUE
        assert message.startswith("step 2: gradients overflow fp16 at precision.min_loss_scale")
        assert "nonfinite gradient was that of encoder.layers.0.ffn.down." in message
        assert message.endswith("rank 1")

"""Learning rates and loss scale by step."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
import torch

from megatron_deberta.config import load_config
from megatron_deberta.config.schema import OptimizerConfig, PrecisionConfig
from megatron_deberta.engine.deepspeed_patches import import_deepspeed
from megatron_deberta.engine.schedule import HYSTERESIS, DynamicLossScale, learning_rate
from megatron_deberta.errors import NumericsError

PAPER = OptimizerConfig(learning_rate=2e-4, warmup_steps=10_000)
"""He et al. 2021, Table 8."""


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 2e-4 / 10_000),
        (4_999, 1e-4),
        (9_999, 2e-4),
        (10_000, 2e-4),
        (505_000, 1e-4),
        (999_999, 2e-4 / 990_000),
        (1_000_000, 0.0),
        (1_000_001, 0.0),
    ],
)
def test_linear_warmup_and_decay_to_zero_at_the_last_step(step: int, rate: float) -> None:
    assert learning_rate(step, PAPER, 1_000_000) == pytest.approx(rate, rel=1e-12)


def test_warmup_as_a_fraction_of_the_steps() -> None:
    fraction, steps = OptimizerConfig(warmup_fraction=0.06), OptimizerConfig(warmup_steps=12)
    for step in range(200):
        assert learning_rate(step, fraction, 200) == learning_rate(step, steps, 200)
    assert load_config(None, ["train.steps=100", "optimizer.warmup_fraction=0.06"])


def rates(total_steps: int, **keys: Any) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, **keys)
    return [learning_rate(step, config, total_steps) for step in range(total_steps + 1)]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "constant"])
def test_rate_rises_then_falls_and_never_leaves_the_peak(schedule: str) -> None:
    found = rates(20, warmup_steps=5, schedule=schedule, decay_steps=4)
    assert found[:5] == sorted(found[:5])
    assert found[5:] == sorted(found[5:], reverse=True)
    assert max(found) <= 1
    assert all(rate > 0 for rate in found[:20])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"warmup_steps": 0}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 0.0]),
        ({"warmup_steps": 2, "schedule": "constant"}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        (
            {"warmup_steps": 0, "schedule": "cosine"},
            [(1 + math.cos(math.pi * x / 4)) / 2 for x in range(5)],
        ),
        (
            {"warmup_steps": 1, "schedule": "wsd", "decay_steps": 2, "decay_shape": "linear"},
            [1.0, 1.0, 1.0, 0.5, 0.0],
        ),
        (
            {"warmup_steps": 1, "schedule": "wsd", "decay_fraction": 0.5},
            [1.0, 1.0, 1.0, 1 - math.sqrt(0.5), 0.0],
        ),
    ],
)
def test_rates_of_four_steps(keys: dict[str, Any], expected: list[float]) -> None:
    assert rates(4, **keys) == pytest.approx(expected, rel=1e-12)


FP16 = PrecisionConfig(dtype="fp16", initial_loss_scale_power=10, loss_scale_window=3)


@pytest.mark.parametrize("seed", range(5))
def test_scale_moves_by_deepspeeds_rules(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)
    theirs = loss_scaler.DynamicLossScaler(
        init_scale=2.0**10,
        scale_window=FP16.loss_scale_window,
        min_scale=FP16.min_loss_scale,
        delayed_shift=HYSTERESIS,
        consecutive_hysteresis=False,
    )
    ours = DynamicLossScale(FP16)
    drawn = random.Random(seed)
    for _ in range(200):
        overflow = drawn.random() < 0.2
        theirs.update_scale(overflow)
        ours.update(overflow)
        assert ours.scale == theirs.cur_scale


def test_overflow_at_the_smallest_scale_names_the_key() -> None:
    scale = DynamicLossScale(
        PrecisionConfig(dtype="fp16", initial_loss_scale_power=0, min_loss_scale=1.0)
    )
    scale.update(overflow=True)
    with pytest.raises(NumericsError, match=re.escape("precision.min_loss_scale=1")):
        scale.update(overflow=True)


def test_continued_scale_moves_as_the_unbroken_one() -> None:
    outcomes = [False, True, False, False, True, True, False, False, False, False, True, False]
    unbroken = DynamicLossScale(FP16)
    for overflow in outcomes[:5]:
        unbroken.update(overflow)
    continued = DynamicLossScale(FP16)
    continued.load_state_dict(unbroken.state_dict())
    for overflow in outcomes[5:]:
        unbroken.update(overflow)
        continued.update(overflow)
        assert continued.state_dict() == unbroken.state_dict()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_other_formats_have_no_scale(dtype: str) -> None:
    scale = DynamicLossScale(PrecisionConfig(dtype=dtype))  # type: ignore[arg-type]
    fp16 = DynamicLossScale(FP16).state_dict()
    for overflow in (True, True, False):
        scale.update(overflow)
    scale.load_state_dict(fp16)
    assert scale.scale == 1.0

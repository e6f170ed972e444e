from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_deberta.config import load_config
from megatron_deberta.config.schema import OptimizerConfig
from megatron_deberta.engine.schedule import learning_rate

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


def test_rate_rises_then_falls_and_never_leaves_the_peak() -> None:
    rates = [learning_rate(step, OptimizerConfig(warmup_steps=5), 20) for step in range(21)]
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert max(rates) == OptimizerConfig().learning_rate
    assert all(rate > 0 for rate in rates[:20])


def test_constant_schedule_warms_up_and_stays() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, schedule="constant")
    assert [learning_rate(step, config, 6) for step in (0, 3, 4, 5, 9)] == [0.25, 1, 1, 1, 1]


def test_no_warmup_starts_at_the_peak() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0)
    assert [learning_rate(step, config, 4) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]


def test_a_run_of_warmup_alone_never_divides_by_zero() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    assert learning_rate(4, config, 4) == 0.0


def rates(**keys: Any) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, **keys)
    return [learning_rate(step, config, 10) for step in range(10)]


def test_cosine_is_half_a_period_after_the_warmup() -> None:
    expected = [(1 + math.cos(math.pi * x / 8)) / 2 for x in range(8)]
    assert rates(schedule="cosine") == pytest.approx([0.5, 1.0, *expected], rel=1e-12)


def test_wsd_is_stable_until_the_decay() -> None:
    linear = rates(schedule="wsd", decay_steps=4, decay_shape="linear")
    assert linear == pytest.approx([0.5, *[1.0] * 5, 1.0, 0.75, 0.5, 0.25])
    root = rates(schedule="wsd", decay_steps=4)
    assert root[6:] == pytest.approx([1 - math.sqrt(x / 4) for x in range(4)])
    assert rates(schedule="wsd", decay_fraction=0.4) == root


def test_the_stable_part_of_wsd_is_the_constant_schedule() -> None:
    assert rates(schedule="wsd", decay_steps=4)[:6] == rates(schedule="constant")[:6]


def test_release_is_not_rescaled_after_the_warmup() -> None:
    # microsoft/DeBERTa's warmup_linear: 1 - x with x = step / total.
    assert rates(schedule="microsoft") == pytest.approx(
        [0.5, 1.0, *[1 - s / 10 for s in range(2, 10)]]
    )

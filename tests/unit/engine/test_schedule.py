from __future__ import annotations

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

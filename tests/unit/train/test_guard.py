"""What counts as a spike, what is remembered of it, and when a run has to go back."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace

import pytest

from megatron_deberta.config import load_config
from megatron_deberta.config.schema import DataConfig, RunConfig, StabilityConfig
from megatron_deberta.engine.base import StepOutcome
from megatron_deberta.train.stability.guard import Guard, GuardState, Skip

CONFIG = StabilityConfig(spike_window=20, spike_warmup=10, max_skips=3, max_rollbacks=2)


def taken(norm: float = 1.0) -> StepOutcome:
    return StepOutcome(norm, False, 1.0)


def fed(guard: Guard, losses: list[float], first: int = 1) -> list[int]:
    """Give a guard the losses of steps; returns the steps it skips."""
    skipped = []
    for step, loss in enumerate(losses, start=first):
        skip = guard.check_loss(loss)
        guard.record(step, loss, taken(), skip)
        if skip is not None:
            skipped.append(step)
    return skipped


def noise(count: int, seed: int = 0) -> list[float]:
    drawn = random.Random(seed)
    return [drawn.gauss(5.0, 0.5) for _ in range(count)]


def test_the_limit_is_six_deviations_over_the_window() -> None:
    guard = Guard(CONFIG)
    fed(guard, [1.0, 3.0] * 10)
    assert guard.check_loss(2.0 + 6 * 1.0) is None
    assert guard.check_loss(math.nextafter(8.0, 9.0)) == "loss spike"
    # Two of the old are gone: twice four instead.
    fed(guard, [4.0, 4.0], first=21)
    mean = (9 * 4.0 + 8.0) / 20
    deviation = math.sqrt((9 * 1 + 9 * 9 + 2 * 16) / 20 - mean**2)
    assert guard.check_loss(mean + 6 * deviation + 1e-9) == "loss spike"
    assert guard.check_loss(mean + 6 * deviation - 1e-9) is None


def test_nothing_is_a_spike_before_the_warm_up_or_without_limits() -> None:
    guard = Guard(CONFIG)
    assert fed(guard, [1.0] * 9 + [50.0]) == []
    assert fed(Guard(StabilityConfig(spike_sigmas=0)), [*noise(200), 1e30]) == []
    assert Guard(CONFIG).norm_limit() == math.inf


def test_a_quiet_window_does_not_make_ordinary_steps_spikes() -> None:
    guard = Guard(CONFIG)
    fed(guard, [2.0] * 20)
    assert guard.check_loss(2.11) is None
    assert guard.check_loss(2.13) == "loss spike"


def test_what_was_skipped_does_not_raise_the_limit() -> None:
    guard = Guard(CONFIG)
    fed(guard, noise(20))
    window = list(guard.state.losses)
    assert fed(guard, [100.0, math.nan, math.inf], first=21) == [21, 22, 23]
    assert guard.state.losses == window


def test_norms_are_compared_by_factors() -> None:
    guard = Guard(CONFIG)
    for step in range(1, 21):
        guard.record(step, 1.0, taken(4.0 if step % 2 else 1.0), None)
    # The logarithms' mean is that of 2, their deviation a factor of 2.
    assert guard.norm_limit() == pytest.approx(2.0 * 2.0**6)
    quiet = Guard(CONFIG)
    for step in range(1, 21):
        quiet.record(step, 1.0, taken(0.0 if step < 3 else 1.0), None)
    assert 1.0 < quiet.norm_limit() < math.inf


@pytest.mark.parametrize("seed", range(5))
def test_clean_noise_is_never_skipped_and_spikes_of_ten_deviations_always(seed: int) -> None:
    losses = noise(2000, seed)
    guard = Guard(StabilityConfig())
    assert fed(guard, losses) == []
    drawn = random.Random(seed)
    spikes = sorted(drawn.sample(range(100, 2000), 20))
    losses = [loss + 10 * 0.5 * (step in spikes) for step, loss in enumerate(losses, start=1)]
    assert fed(Guard(StabilityConfig()), losses) == spikes


def test_the_memory_survives_json_bit_for_bit() -> None:
    losses = noise(60)
    losses[40], losses[50] = 90.0, math.nan
    unbroken, first = Guard(CONFIG), Guard(CONFIG)
    expected = fed(unbroken, losses)
    assert expected == [41, 51]
    found = fed(first, losses[:45])
    again = Guard(CONFIG, state=GuardState(**json.loads(json.dumps(asdict(first.state)))))
    assert found + fed(again, losses[45:], first=46) == expected
    assert again.state == unbroken.state
    assert again.norm_limit() == unbroken.norm_limit()


def test_longer_rows_start_a_new_window() -> None:
    run = replace(RunConfig(), data=DataConfig(short_steps=20), stability=CONFIG)
    guard = Guard.of_run(run)
    assert fed(guard, [*([2.0] * 20), *([9.0] * 20)]) == []
    assert guard.state.losses == [9.0] * 20


def test_phases_start_a_new_window_but_levels_of_a_ramp_do_not() -> None:
    ramp = "train.ramp_from=128 train.ramp_increment=128 train.ramp_steps=4"
    phases = f'train.phases=["steps=10 {ramp}", "steps=10"]'
    config = load_config(None, [phases, "optimizer.warmup_steps=0"])
    guard = Guard.of_run(config)
    assert guard.change_steps == {10}
    fed(guard, [2.0] * 12)
    assert guard.state.losses == [2.0] * 2


@pytest.mark.parametrize(
    ("norm", "is_fp16", "reason"),
    [
        (9.0, False, "gradient spike"),
        (math.inf, False, "gradient not finite"),
        (math.inf, True, "overflow"),
    ],
)
def test_why_the_engine_skipped(norm: float, is_fp16: bool, reason: Skip) -> None:
    guard = Guard(CONFIG, is_fp16=is_fp16)
    outcome = StepOutcome(norm, True, 1.0)
    assert guard.check_outcome(outcome) == reason
    guard.record(4, 2.0, outcome, reason)
    # The loss scale looks for its height by overflowing.
    assert guard.state.skips == ([] if reason == "overflow" else [4])
    assert guard.check_outcome(taken()) is None


def test_skips_close_together_are_trouble_and_far_apart_are_not() -> None:
    guard = Guard(CONFIG)
    fed(guard, noise(20))
    for step in range(21, 121):
        guard.record(step, 1e9, taken(), "loss spike" if step % 10 == 1 else None)
        assert not guard.too_many_skips
    for step in (121, 122):
        guard.record(step, 1e9, taken(), "loss spike")
    assert guard.too_many_skips
    assert guard.state.skips == [111, 121, 122]
    assert guard.last_good_step == 110
    assert guard.can_roll_back


def test_going_back_counts_until_the_trouble_is_behind() -> None:
    state = GuardState(rollbacks=5, vain_rollbacks=2, trouble_step=100)
    guard = Guard(CONFIG, state=state)
    assert not guard.can_roll_back
    fed(guard, [2.0] * 121)
    assert guard.can_roll_back
    assert (guard.state.rollbacks, guard.state.vain_rollbacks) == (5, 0)

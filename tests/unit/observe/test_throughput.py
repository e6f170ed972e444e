"""Throughput and MFU with a simulated clock."""

import time

import pytest
import torch

from megatron_deberta.observe.throughput import (
    StepWork,
    ThroughputMeter,
    measure_matmul_rate,
)


def test_meter_leaves_out_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    meter = ThroughputMeter(work=StepWork(100, 5.0, 1.0), matmul_rate=1000)
    for _ in range(4):
        now += 0.5
        meter.step_done()
    with meter.paused():
        now += 60
    lap = meter.lap()
    assert lap.seconds_per_step == pytest.approx(0.5)
    assert lap.tokens_per_second == pytest.approx(200)
    assert lap.utilization == pytest.approx(1.0)
    assert lap.hardware_utilization == pytest.approx(1.2)
    assert lap.flops_per_second == pytest.approx(1000)
    with pytest.raises(ValueError, match="no step"):
        meter.lap()


def test_rate_that_was_measured_under_load_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    now, measured = 100.0, [400.0, 500.0, 700.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def measure() -> float:
        nonlocal now
        now += 0.25
        return measured.pop(0)

    meter = ThroughputMeter(work=StepWork(100, 5.0), matmul_rate=300, measure=measure)

    def lap(seconds: float) -> float:
        nonlocal now
        now += seconds
        meter.step_done()
        return meter.lap().utilization

    # The first lap of 250 FLOP/s, as after every start.
    assert lap(2.0) == pytest.approx(250 / 400)
    assert lap(2.0) == pytest.approx(250 / 400)
    # 450 FLOP/s are more than the rate.
    assert lap(500 / 450) == pytest.approx(450 / 500)
    # What is reached counts where no measurement shows it.
    assert lap(500 / 900) == 1.0
    assert meter.matmul_rate == pytest.approx(900)
    assert measured == []


def test_matmul_rate_is_plausible() -> None:
    rate = measure_matmul_rate(torch.device("cpu"), torch.float32)
    assert 1e8 < rate < 1e15

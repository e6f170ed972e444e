"""Throughput of a run: tokens per second, the measured matrix rate, and MFU relative to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

LIMIT_SECONDS = 0.25
"""No repeat of a measurement starts after this time."""


def measure_matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the rate of a large square matrix product; the best of several repeats.

    Args:
        device: device to measure.
        dtype: dtype of the factors.

    Returns:
        FLOP/s of this device (on CPU: of this process's threads).
    """
    on_gpu = device.type == "cuda"
    # 16-bit products are slow on processors that lack the instructions.
    size = 8192 if on_gpu else 768 if dtype == torch.float32 else 256
    # Random, because constant data draws less power and lets a GPU clock higher than real data.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2)
    )
    best = float("inf")
    begin = time.perf_counter()
    for repeat in range(20):
        start = time.perf_counter()
        if repeat > 1 and start - begin > LIMIT_SECONDS:
            break
        torch.mm(left, right)
        if on_gpu:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return float(2 * size**3 / best)


class Throughput(NamedTuple):
    """Speed over some steps, of all ranks together."""

    tokens_per_second: float
    utilization: float
    """MFU: model FLOP/s, without recomputation, over the matrix rate."""
    hardware_utilization: float
    """The same, including recomputation."""
    flops_per_second: float
    seconds_per_step: float


class StepWork(NamedTuple):
    """Work of an optimizer step."""

    tokens: int
    flops_per_token: float
    recomputed_per_token: float = 0.0

    @property
    def flops(self) -> float:
        """Floating-point operations of a step, without recomputation."""
        return self.tokens * self.flops_per_token


@dataclass(kw_only=True)
class ThroughputMeter:
    """Times steps between records; ``paused`` excludes time that is not training.

    Args:
        work: work of a step.
        matmul_rate: FLOP/s of all ranks together, from ``measure_matmul_rate``.
        measure: measures that rate again. The first measurement falls into the start of the other
            ranks, which use the same cores and memory; None: the rate is right.
    """

    work: StepWork
    matmul_rate: float
    measure: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        """Start the first lap."""
        self._is_first_lap = True
        self._start_lap()

    def _start_lap(self) -> None:
        self._start = time.perf_counter()
        self._steps = self._tokens = 0
        self._flops = self._recomputed = 0.0

    def step_done(self) -> None:
        """Count one optimizer step."""
        work = self.work
        self._steps += 1
        self._tokens += work.tokens
        self._flops += work.flops
        self._recomputed += work.tokens * work.recomputed_per_token

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in the context, such as a validation or a checkpoint."""
        before = time.perf_counter()
        yield
        self._start += time.perf_counter() - before

    def lap(self) -> Throughput:
        """Return the speed since the last lap and start the next one.

        Raises:
            ValueError: no step was counted since the last lap.
        """
        if self._steps == 0:
            raise ValueError("no step since the last lap")
        seconds = max(time.perf_counter() - self._start, 1e-9)
        flops = self._flops / seconds
        if self.measure is not None:
            self._correct_rate(self.measure, flops + self._recomputed / seconds)
        throughput = Throughput(
            tokens_per_second=self._tokens / seconds,
            utilization=flops / self.matmul_rate,
            hardware_utilization=(flops + self._recomputed / seconds) / self.matmul_rate,
            flops_per_second=flops,
            seconds_per_step=seconds / self._steps,
        )
        self._start_lap()
        return throughput

    def _correct_rate(self, measure: Callable[[], float], reached: float) -> None:
        """Measure the matrix rate again after the first lap, and when training is faster."""
        if self._is_first_lap or reached > self.matmul_rate:
            self.matmul_rate = max(self.matmul_rate, measure())
        self._is_first_lap = False
        # What training reaches, the device can do.
        self.matmul_rate = max(self.matmul_rate, reached)

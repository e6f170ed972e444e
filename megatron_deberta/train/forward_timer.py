"""Timer of forward passes, by CUDA events on GPUs; never synchronizes with the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ForwardTimer:
    """Accumulates the time of forward passes.

    Args:
        device: the device they run on.
        cuda: replaces ``torch.cuda`` in tests.
    """

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self._cuda = torch.cuda if cuda is None and device.type == "cuda" else cuda
        self._done = 0
        self._pending: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time one pass."""
        if self._cuda is None:
            begin = time.perf_counter_ns()
            yield
            self._done += time.perf_counter_ns() - begin
            return
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))

    def take(self) -> int:
        """Return the nanoseconds of passes completed since the last call."""
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            self._done += round(begin.elapsed_time(end) * 1e6)
        done, self._done = self._done, 0
        return done

"""Clocks and memory for benchmarks, on the CPU and on CUDA alike.

On CUDA the device's own events take the time, and a pause is queued before each measured piece so
that the host has launched all of it before the device begins: what is measured is the device, not
Python. Medians; variants take turns, because clocks and load drift.
"""

from __future__ import annotations

import gc
import json
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatron_deberta.files import write_atomically

# About two milliseconds of an idle device, in which the host gets ahead.
PAUSE_CYCLES = 4_000_000


class Stopwatch:
    """Marks points in a piece of work; ``seconds`` are between neighbouring marks.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._marks: list[Any] = []
        if self._cuda:
            torch.cuda._sleep(PAUSE_CYCLES)

    def mark(self) -> None:
        """Note where the device's queue, or the host's clock, is now."""
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Wait for the work and read the clock."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._cuda:
            return [end - start for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def in_turns(
    jobs: Mapping[str, Callable[[], Sequence[float]]],
    *,
    least: int,
    most: int,
    budget: float,
    warm_up: int = 1,
) -> dict[str, list[float]]:
    """Medians of the times that each job gives, the jobs taking turns.

    Args:
        jobs: each does its work once and returns seconds, always as many.
        least: rounds that are taken in any case.
        most: rounds after which it is enough.
        budget: seconds after which no round is begun beyond ``least``.
        warm_up: rounds before those that count.

    Returns:
        Seconds by job, one median for each time the job gives.
    """
    taken: dict[str, list[Sequence[float]]] = {name: [] for name in jobs}
    start = time.perf_counter()
    for turn in range(warm_up + most):
        if turn >= warm_up + least and time.perf_counter() - start > budget:
            break
        for name, job in jobs.items():
            seconds = job()
            if turn >= warm_up:
                taken[name].append(seconds)
    return {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in taken.items()
    }


def cuda_peak_bytes(work: Callable[[], object]) -> int:
    """Device memory that a piece of work adds at its peak to what is allocated already."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_resident_bytes(pid: int | str = "self") -> int:
    """Return the peak resident size of a process, 0 if it has ended (Linux).

    ``getrusage`` may give the peak of the parent instead.
    """
    return _status_bytes(pid, "VmHWM")


def anonymous_bytes() -> int:
    """Return the memory of this process without mapped files, which processes share."""
    return _status_bytes("self", "RssAnon")


def _status_bytes(pid: int | str, key: str) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"{key}:\s+(\d+)", status)
    return 1024 * int(found[1]) if found else 0


def disk_usage(folder: Path) -> int:
    """Return the bytes that a folder occupies; files may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_blocks * 512
    return total


def _process_tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


class ResourceWatch(threading.Thread):
    """Records the peak memory of a process tree and the peak disk usage of folders.

    Args:
        pid: the root process; the thread ends with it.
        folders: measured once per second.

    Attributes:
        peaks: peak resident bytes by process.
        disk: peak bytes of the folders.
    """

    def __init__(self, pid: int, folders: Sequence[Path] = ()) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._folders = folders
        self.peaks: dict[int, int] = {}
        self.disk = 0

    def run(self) -> None:
        """Sample memory twenty times per second until the process ends."""
        last = 0.0
        while Path(f"/proc/{self._pid}").exists():
            for pid in _process_tree(self._pid):
                self.peaks[pid] = max(self.peaks.get(pid, 0), peak_resident_bytes(pid))
            if time.monotonic() - last > 1:
                last = time.monotonic()
                self.disk = max(self.disk, sum(map(disk_usage, self._folders)))
            time.sleep(0.05)


def matrix_rate(device: str, dtype: torch.dtype, size: int | None = None) -> float:
    """FLOP/s of a square matrix product on random data, the median of several.

    Random, because products of constants need less power, so that clocks rise and the rate with
    them.

    Args:
        device: where to measure.
        dtype: of the factors.
        size: rows and columns; None takes one that fills the device.
    """
    size = size or (8192 if device == "cuda" else 1024)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def product() -> list[float]:
        watch = Stopwatch(device)
        watch.mark()
        torch.mm(left, right)
        watch.mark()
        return watch.seconds()

    return 2 * size**3 / in_turns({"": product}, least=5, most=10, budget=2.0)[""][0]


def read_json(path: Path, default: Any) -> Any:
    """Return the content of a result file, or the default if it does not exist."""
    return json.loads(path.read_text()) if path.exists() else default


def write_json(path: Path, content: object) -> None:
    """Write a result file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())

"""Timers and memory measurement for benchmarks on the CPU and on CUDA.

On CUDA, times are taken with device events, and a pause is queued before each measurement so that
the host has launched all work before the device starts: the device is measured, not Python. Times
are medians, and variants alternate because clock rates and load drift.
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

# About two milliseconds, in which the host launches the work.
PAUSE_CYCLES = 4_000_000


class Stopwatch:
    """Measures the time between successive marks.

    Args:
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._marks: list[Any] = []
        if self._cuda:
            torch.cuda._sleep(PAUSE_CYCLES)

    def mark(self) -> None:
        """Record the current point of the device's stream or of the host's clock."""
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Wait for the work; return the seconds between neighbouring marks."""
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
    """Run the jobs in turns and return the medians of their times.

    Args:
        jobs: each runs once and returns a fixed number of times in seconds.
        least: minimum number of rounds.
        most: maximum number of rounds.
        budget: seconds after which no round beyond ``least`` starts.
        warm_up: rounds that are not counted.

    Returns:
        Seconds by job, one median for each time that the job returns.
    """
    times: dict[str, list[Sequence[float]]] = {name: [] for name in jobs}
    start = time.perf_counter()
    for turn in range(warm_up + most):
        if turn >= warm_up + least and time.perf_counter() - start > budget:
            break
        for name, job in jobs.items():
            seconds = job()
            if turn >= warm_up:
                times[name].append(seconds)
    return {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in times.items()
    }


def cuda_peak_bytes(work: Callable[[], object]) -> int:
    """Return the device memory that a function adds at its peak."""
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
    """Return this process's resident memory without mapped files, which processes share."""
    return _status_bytes("self", "RssAnon")


def _status_bytes(pid: int | str, key: str) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"{key}:\s+(\d+)", status)
    return 1024 * int(found[1]) if found else 0


def disk_usage(folder: Path) -> int:
    """Return the bytes that a folder occupies; files may disappear during the call."""
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


def read_json(path: Path, default: Any) -> Any:
    """Return the content of a result file, or the default if it does not exist."""
    return json.loads(path.read_text()) if path.exists() else default


def write_json(path: Path, content: object) -> None:
    """Write a result file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())

"""Time axis of a run (``timeline.jsonl``): starts, ends, time by part and memory; rank 0 only.

Unlike ``metrics.jsonl``, it is not cut on resume, so that it shows restarts and repeated steps.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson
import torch

from megatron_deberta.errors import describe_error, printable
from megatron_deberta.observe.metrics import JsonLines
from megatron_deberta.observe.progress import ProgressObserver, Section

FILE_NAME = "timeline.jsonl"
FORWARD = "forward"
"""Part of a step that is recorded beside the sections."""


class SectionTimer(ProgressObserver):
    """Adds up the time that this rank spends in each section.

    Args:
        observer: notified as well.

    Attributes:
        step: completed steps of this process; None: it has not begun to train.
    """

    def __init__(self, observer: ProgressObserver) -> None:
        self._observer = observer
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self.step: int | None = None

    def enter(self, section: Section, step: int | None = None) -> None:
        """Report the start of a section."""
        self._switch(section)
        self.step = self.step if step is None else step
        self._observer.enter(section, step)

    def mark(self) -> None:
        """Report progress within a section."""
        self._observer.mark()

    def add_times(self, *, steps: int = 0, data: int = 0, forward: int = 0, whole: int = 0) -> None:
        """Add completed steps and the nanoseconds spent on them."""
        self._add(FORWARD, forward / 1e9)
        self._observer.add_times(steps=steps, data=data, forward=forward, whole=whole)

    def take(self) -> dict[str, float]:
        """Return the seconds by part since the last call; ``step`` is without ``forward``."""
        self._switch(self.current)
        taken, self._seconds = self._seconds, {}
        step, forward = taken.get(Section.STEP.label, 0.0), taken.get(FORWARD, 0.0)
        taken |= {Section.STEP.label: max(0.0, step - forward)}
        return {part: round(seconds, 4) for part, seconds in taken.items() if seconds > 0}

    def _switch(self, section: Section) -> None:
        now = time.perf_counter()
        self._add(self.current.label, now - self._since)
        self.current, self._since = section, now

    def _add(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds


@dataclass
class Timeline:
    """Writes the time axis of a run; a context manager, entered when the run has resumed.

    Args:
        run_dir: run folder.
        timer: times of this rank.
        device: device whose peak memory is recorded; on CPU, that of the process.
        step: completed steps at the start.
        world_size: number of ranks.
        check: called before each write; does not return if another process writes the folder.
    """

    run_dir: str
    timer: SectionTimer
    device: torch.device
    step: int
    world_size: int
    check: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        """Name the file."""
        self._lines = JsonLines(Path(self.run_dir) / FILE_NAME, self.check)

    def __enter__(self) -> Timeline:
        """Record the start."""
        self._write("start", world_size=self.world_size, device=device_name(self.device))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Record the end; ``reason`` names an exception."""
        # Not every step is recorded.
        self.step = self.step if self.timer.step is None else self.timer.step
        self._write("end", reason=describe_error(error), **self._measures())

    def record(self, step: int) -> None:
        """Record time and memory after ``step`` steps."""
        self.step = step
        self._write("steps", **self._measures())

    def _measures(self) -> dict[str, object]:
        return {"seconds": self.timer.take(), "memory_bytes": peak_memory(self.device)}

    def _write(self, event: str, **values: object) -> None:
        now = round(time.time(), 3)
        self._lines.append({"event": event, "time": now, "step": self.step, **values})


def device_name(device: torch.device) -> str:
    """Return the name of a GPU's model; ``CPU`` otherwise."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def read_devices(run_dir: Path) -> list[str]:
    """Return the devices of rank 0 at the starts of a run, each once; damaged lines are ignored."""
    path = run_dir / FILE_NAME
    names: list[str] = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        device = record.get("device") if isinstance(record, dict) else None
        if isinstance(device, str) and device not in names:
            names.append(printable(device))
    return names


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that torch has allocated on a GPU, or that the process has held."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

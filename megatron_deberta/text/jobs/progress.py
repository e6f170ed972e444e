"""Progress of a job: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Counts = Mapping[str, int]
"""``text_bytes`` read, ``tokens``, ``documents`` and records ``quarantined``, as far as known."""
Advance = Callable[[str, int, int, Counts], None]
"""Called with a stage, its size, how much of it is done, and what was counted in it so far."""

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_REFRESHES = 0.2


class ProgressDisplay:
    """Context manager that shows the stage, MB/s, tokens/s, ETA, workers and quarantined records.

    Args:
        title: the command.
        workers: returns the number of units that run at the same time; 0: unknown.
        console: where to show it; None: standard error.
    """

    def __init__(
        self, title: str, workers: Callable[[], int] = lambda: 0, console: Console | None = None
    ) -> None:
        """See the class."""
        self._console = console or Console(stderr=True)
        self._title = title
        self._workers = workers
        self._stage = ""
        self._begin = self._last_line = self._last_refresh = 0.0
        self._done_before = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            # Without a thread: a forked copy of a process with threads can deadlock.
            auto_refresh=False,
        )
        self._task = self._bar.add_task(title, visible=False, rates="")

    def __enter__(self) -> ProgressDisplay:
        """Show the bar if there is a terminal."""
        self._bar.start()
        return self

    def advance(self, stage: str, size: int, done: int, counts: Counts) -> None:
        """Show a stage, see ``Advance``; its clock starts with the first call."""
        now = time.monotonic()
        name = f"{self._title}: {stage}"
        if stage != self._stage:
            self._stage, self._begin, self._last_line, self._done_before = stage, now, now, done
            self._bar.reset(self._task, total=size, description=name, visible=True)
        seconds = max(now - self._begin, 1e-9)
        rates = self._describe(counts, seconds)
        self._bar.update(self._task, completed=done, rates=", ".join(rates))
        if done == size or now - self._last_refresh >= _SECONDS_BETWEEN_REFRESHES:
            self._last_refresh = now
            self._bar.refresh()
        is_due = done == size or now - self._last_line >= _SECONDS_BETWEEN_LINES
        if is_due and self._bar.disable:
            self._last_line = now
            if self._done_before < done < size:
                left = seconds * (size - done) / (done - self._done_before)
                rates.insert(0, f"ETA {left:,.0f} s")
            line = ", ".join([f"{name} {done / max(size, 1):.0%}", *rates])
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._bar.stop()

    def _describe(self, counts: Counts, seconds: float) -> list[str]:
        text_bytes, tokens, quarantined = (
            counts.get(name, 0) for name in ("text_bytes", "tokens", "quarantined")
        )
        workers = self._workers()
        return [
            *([f"{text_bytes / seconds / 1e6:.1f} MB/s"] if text_bytes else []),
            *([f"{tokens / seconds:,.0f} tokens/s"] if tokens else []),
            *([f"{workers} workers"] if workers else []),
            *([f"{quarantined:,} quarantined"] if quarantined else []),
        ]

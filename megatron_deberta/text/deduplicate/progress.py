"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class StageDisplay:
    """Context manager that shows the stage at work and how many of its tasks are done.

    Args:
        console: where to show it; None: standard error.
        title: what is being done.
    """

    def __init__(self, console: Console | None = None, title: str = "deduplicate") -> None:
        """See the class."""
        self._console = console or Console(stderr=True)
        self._title = title
        self._last_line = 0.0
        self._stage = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, visible=False)

    def __enter__(self) -> StageDisplay:
        """Show the bar where there is a terminal."""
        self._bar.start()
        return self

    def advance(self, stage: str, tasks: int, done: int) -> None:
        """Take note that a stage has so many tasks and so many of them are done."""
        if stage != self._stage:
            self._stage = stage
            self._last_line = time.monotonic()
            description = f"{self._title}: {stage}"
            self._bar.reset(self._task, total=tasks, description=description, visible=True)
        self._bar.update(self._task, completed=done)
        now = time.monotonic()
        is_due = done == tasks or now - self._last_line >= _SECONDS_BETWEEN_LINES
        if is_due and not self._console.is_terminal:
            self._last_line = now
            line = f"{self._title}: {stage} {done}/{tasks}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self._bar.stop()

"""How far preprocessing is: a bar on a terminal, a line every few seconds elsewhere.

Owns the counters that processes share, and what is shown of them on standard error. Refuses to
know where the numbers come from.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.sharedctypes
import threading
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_LOOKS = 0.5
PHASES = ("starting", "reading", "tokenizing", "committing", "waiting", "merging", "publishing")
_COUNTERS = ("file_bytes", "text_bytes", "tokens", "documents", "quarantined")


class ProgressCounters:
    """What one process has done so far, in memory that it shares with the one that shows it."""

    def __init__(self) -> None:
        """See the class."""
        self._counters = multiprocessing.sharedctypes.RawArray(ctypes.c_int64, len(_COUNTERS) + 1)

    def __getitem__(self, name: str) -> int:
        """Return a counter."""
        return int(self._counters[_COUNTERS.index(name)])

    def counts(self) -> dict[str, int]:
        """Return all counters by name."""
        return {name: self[name] for name in _COUNTERS}

    @property
    def phase(self) -> str:
        """What is being done, one of ``PHASES``."""
        return PHASES[self._counters[len(_COUNTERS)]]

    def enter(self, phase: str) -> None:
        """Say what is done next, one of ``PHASES``."""
        self._counters[len(_COUNTERS)] = PHASES.index(phase)

    def add(self, **counts: int) -> None:
        """Count work done.

        Args:
            counts: ``file_bytes`` read from disk, compressed where the file is; ``text_bytes``
                after decompression; ``tokens``, ``documents`` and records ``quarantined``.
        """
        for name, count in counts.items():
            self._counters[_COUNTERS.index(name)] += count


class ProgressDisplay:
    """Context manager that shows progress while open and a summary when left cleanly.

    Args:
        total_bytes: bytes of all input files; 0 where unknown.
        counters: of the processes at work.
        recorded: tells how many of those bytes are done, before and by processes elsewhere too.
        console: where to show it; None: standard error.
    """

    def __init__(
        self,
        total_bytes: int,
        counters: Sequence[ProgressCounters],
        recorded: Callable[[], int],
        console: Console | None = None,
    ) -> None:
        """See the class."""
        self._console = console or Console(stderr=True)
        self._total = total_bytes
        self._counters = counters
        self._recorded = recorded
        self._done_before = self._done_anywhere = 0
        self._last_recorded = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._show_on, daemon=True)
        self._begin = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%" if total_bytes else ""),
            TextColumn("{task.fields[rates]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> ProgressDisplay:
        """Start the clock, and the bar where there is a terminal."""
        self._look()
        self._done_before = self._done_anywhere
        self._begin = self._last_line = time.monotonic()
        total = self._total or None
        self._task = self._bar.add_task("preprocess", total=total, completed=self._done(), rates="")
        self._bar.start()
        self._thread.start()
        return self

    def refresh(self) -> None:
        """Show the counters as they are."""
        now = time.monotonic()
        if now - self._last_recorded >= _SECONDS_BETWEEN_LINES:
            self._look()
        self._bar.update(
            self._task, description=self._phase(), completed=self._done(), rates=self._rates(now)
        )
        if self._bar.disable and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._show(f"preprocess: {self._phase()}, {self._share(now)}{self._rates(now)}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Take the bar away; on success say what was done."""
        self._stop.set()
        self._thread.join()
        self._bar.stop()
        if kind is None:
            now = time.monotonic()
            if not self._sum("text_bytes"):
                self._show(f"preprocess: nothing was left to tokenize ({now - self._begin:.1f} s)")
                return
            self._show(
                f"preprocess: {self._sum('documents'):,} documents, {self._sum('tokens'):,} tokens "
                f"from {decimal(self._sum('text_bytes'))} of text in {now - self._begin:.1f} s, "
                f"{self._rates(now)}"
            )

    def _show_on(self) -> None:
        while not self._stop.wait(_SECONDS_BETWEEN_LOOKS):
            self.refresh()

    def _look(self) -> None:
        self._last_recorded = time.monotonic()
        # The last process to finish, here or elsewhere, takes the records away.
        with contextlib.suppress(OSError):
            self._done_anywhere = self._recorded()

    def _done(self) -> int:
        """Bytes of the files done by any process, begun units of this command's own included."""
        ours = self._done_before + self._sum("file_bytes")
        return min(max(ours, self._done_anywhere), self._total)

    def _sum(self, name: str) -> int:
        return sum(each[name] for each in self._counters)

    def _phase(self) -> str:
        """What most of the processes that have not finished do, the earliest first."""
        phases = [each.phase for each in self._counters]
        return max(PHASES, key=phases.count)

    def _rates(self, now: float) -> str:
        seconds = max(now - self._begin, 1e-9)
        rates = (
            f"{self._sum('text_bytes') / seconds / 1e6:.1f} MB/s, "
            f"{self._sum('tokens') / seconds:,.0f} tokens/s"
        )
        quarantined = self._sum("quarantined")
        return f"{rates}, {quarantined:,} quarantined" if quarantined else rates

    def _share(self, now: float) -> str:
        done = self._done()
        if done <= self._done_before:
            return ""
        remaining = (now - self._begin) * (self._total - done) / (done - self._done_before)
        return f"{done / self._total:.0%}, ETA {remaining:,.0f} s, "

    def _show(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

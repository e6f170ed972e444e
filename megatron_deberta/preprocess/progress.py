"""How far preprocessing is: a bar on a terminal, a line every few seconds elsewhere.

Owns what is shown, on standard error. Refuses to know where the numbers come from.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 5.0


class ProgressDisplay:
    """Context manager that shows progress while open and a summary when left cleanly.

    Args:
        total_bytes: bytes of all input files; 0 where unknown.
        console: where to show it; None: standard error.
    """

    def __init__(self, total_bytes: int, console: Console | None = None) -> None:
        """See the class."""
        self._console = console or Console(stderr=True)
        self._total = total_bytes
        self._file_bytes = self._text_bytes = self._tokens = self._documents = 0
        self._begin = self._last_line = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> ProgressDisplay:
        """Start the clock, and the bar where there is a terminal."""
        self._begin = self._last_line = time.monotonic()
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("preprocess"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%" if self._total else ""),
                TextColumn("{task.fields[rates]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.add_task("", total=self._total or None, rates="")
            self._bar.start()
        return self

    def advance(self, *, file_bytes: int, text_bytes: int, tokens: int, documents: int) -> None:
        """Count work done.

        Args:
            file_bytes: bytes read from disk, compressed where the file is.
            text_bytes: bytes after decompression.
            tokens: tokens written.
            documents: documents written.
        """
        self._file_bytes += file_bytes
        self._text_bytes += text_bytes
        self._tokens += tokens
        self._documents += documents
        now = time.monotonic()
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=self._file_bytes, rates=self._rates(now))
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._show(f"preprocess: {self._share(now)}{self._rates(now)}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the bar away; on success say what was done."""
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            now = time.monotonic()
            self._show(
                f"preprocess: {self._documents:,} documents, {self._tokens:,} tokens from "
                f"{decimal(self._text_bytes)} of text in {now - self._begin:.1f} s, "
                f"{self._rates(now)}"
            )

    def _rates(self, now: float) -> str:
        seconds = max(now - self._begin, 1e-9)
        return (
            f"{self._text_bytes / seconds / 1e6:.1f} MB/s, {self._tokens / seconds:,.0f} tokens/s"
        )

    def _share(self, now: float) -> str:
        if not self._total or not self._file_bytes:
            return ""
        share = min(self._file_bytes / self._total, 1.0)
        remaining = (now - self._begin) * (1 / share - 1)
        return f"{share:.0%}, ETA {remaining:,.0f} s, "

    def _show(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

"""A rank's output: its copy into the log, its last lines, and the error at its end."""

from __future__ import annotations

import os
import re
import select
import sys
import threading
from pathlib import Path

_TAIL_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 16
_POLL_MILLISECONDS = 100
_LAST_LINES = 20
_ERROR = re.compile(
    r"(?:\[rank\d+\]: )?(?:[A-Za-z_][\w.]*(?:Error|Exception)\b|megatron-deberta: )"
)
_MAX_CHARACTERS = 300


class RankOutput:
    """Copies what a rank writes to its log, in a thread, and keeps its end.

    On a full disk the log is incomplete, and the end that is kept says why the rank failed.

    Args:
        log: the file, which is extended.
        is_shown: copy it to standard output, too.

    Attributes:
        descriptor: where the rank writes; ``start`` closes it in this process.
        problem: why the log is incomplete; empty: it is complete.
    """

    def __init__(self, log: Path, *, is_shown: bool = False) -> None:
        self.log, self.problem = log, ""
        self._is_shown = is_shown
        self._source, self.descriptor = os.pipe()
        self._tail = b""
        self._has_ended = False
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def start(self) -> None:
        """Start to copy; the rank has its own descriptor by now."""
        os.close(self.descriptor)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Copy what is left after the end of the rank; processes that it has left do not count.

        Args:
            seconds: time to wait; a disk that does not answer holds the copy up.
        """
        self._has_ended = True
        self._thread.join(seconds)

    def last_error(self) -> str:
        """Return the last line that names an error, or else the last line."""
        lines = self.last_lines()
        return _find_error(self._lines()) or (lines[-1].strip()[:_MAX_CHARACTERS] if lines else "")

    def last_lines(self) -> list[str]:
        """Return the last lines that are not empty."""
        return [line for line in self._lines() if line.strip()][-_LAST_LINES:]

    def _lines(self) -> list[str]:
        return self._tail.decode(errors="replace").splitlines()

    def _copy(self) -> None:
        target = -1
        try:
            target = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self.problem = error.strerror or str(error)
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        while True:
            if not poll.poll(_POLL_MILLISECONDS):
                if self._has_ended:
                    break
                continue
            block = os.read(self._source, _BLOCK_BYTES)
            if not block:
                break
            self._tail = (self._tail + block)[-_TAIL_BYTES:]
            self._write(target, block)
        os.close(self._source)
        if target >= 0:
            os.close(target)

    def _write(self, target: int, block: bytes) -> None:
        try:
            rest = block if target >= 0 else b""
            while rest:
                rest = rest[os.write(target, rest) :]
        except OSError as error:
            self.problem = error.strerror or str(error)
        if self._is_shown:
            try:
                sys.stdout.buffer.write(block)
                sys.stdout.flush()
            except OSError:
                # Nobody reads it any more.
                self._is_shown = False


def last_error(log: Path) -> str:
    """Return the last line of a log that names an error, cut to 300 characters; empty: none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return _find_error(lines)


def _find_error(lines: list[str]) -> str:
    found = next((line for line in reversed(lines) if _ERROR.match(line)), "")
    return found.removeprefix("megatron-deberta: ").strip()[:_MAX_CHARACTERS]


def same_error(first: str, second: str) -> bool:
    """Return whether two errors are the same up to numbers, such as ports and addresses."""
    return bool(first) and _without_numbers(first) == _without_numbers(second)


def _without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)

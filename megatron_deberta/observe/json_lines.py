"""JSON Lines that training appends to for reports; a full disk loses lines, not the run."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from megatron_deberta.files import (
    MAX_RECORD_BYTES,
    open_appending,
    read_regular,
    write_atomically,
)

logger = logging.getLogger(__name__)


class JsonLines:
    """Appends objects to a file, each as one line and in one write.

    Args:
        path: the file, in an existing folder.
        check: called before each change; does not return if another process now writes the folder.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self._check = check
        self._has_warned = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Append an object; nonfinite numbers become null. A failure is a warning."""
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        try:
            self._check()
            with open_appending(self.path) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
                    # A process was killed while it wrote; its line must not spoil this one.
                    line = b"\n" + line
                if stream.write(line) != len(line):
                    os.ftruncate(stream.fileno(), size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._warn(error)

    def cut_after(self, step: int) -> None:
        """Remove the objects of later steps, and damaged lines. A failure is a warning."""
        try:
            lines = read_regular(self.path, MAX_RECORD_BYTES).splitlines(keepends=True)
            kept = [line for line in lines if _step(line) <= step]
            if len(kept) < len(lines):
                self._check()
                write_atomically(self.path, b"".join(kept))
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            logger.warning("%s: %s; training goes on", self.path, error)
        self._has_warned = True


def _step(line: bytes) -> float:
    """Return the step of a line; infinity: it is damaged or has none."""
    try:
        step = orjson.loads(line)["step"] if line.endswith(b"\n") else None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        step = None
    return step if isinstance(step, int) else float("inf")

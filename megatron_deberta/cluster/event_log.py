"""JSON lines that outlive a crash: each is flushed, and one that was cut short is skipped."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def append_event(path: Path, event: Mapping[str, Any]) -> None:
    """Append a line durably, and as a whole beside those of other processes.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as stream:
        line = json.dumps(event).encode() + b"\n"
        if stream.tell() and os.pread(stream.fileno(), 1, stream.tell() - 1) != b"\n":
            # A former line was cut short, such as by a full disk; it must not spoil this one.
            line = b"\n" + line
        if stream.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(stream.fileno())


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file in order; an empty list without the file."""
    events = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                events.append(json.loads(line))
    return [event for event in events if isinstance(event, dict)]

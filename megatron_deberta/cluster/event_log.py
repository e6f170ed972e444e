"""JSON lines that outlive a crash: each is flushed, and one that was cut short is skipped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def append_event(path: Path, event: Mapping[str, Any]) -> None:
    """Append a line durably, and as a whole beside those of other processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as stream:
        stream.write(json.dumps(event).encode() + b"\n")
        os.fsync(stream.fileno())


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file in order; an empty list without the file."""
    events = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                events.append(json.loads(line))
    return [event for event in events if isinstance(event, dict)]

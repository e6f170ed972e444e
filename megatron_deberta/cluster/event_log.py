"""JSON lines that outlive a crash: each is flushed, and damaged ones are skipped."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron_deberta.errors import DataError
from megatron_deberta.files import MAX_RECORD_BYTES, open_appending, read_regular
from megatron_deberta.parsing import parse_json

T = TypeVar("T")

logger = logging.getLogger(__name__)


def append_event(path: Path, event: Mapping[str, Any]) -> None:
    """Append a line durably, and as a whole beside those of other processes.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_appending(path) as stream:
        line = json.dumps(event).encode() + b"\n"
        size = os.fstat(stream.fileno()).st_size
        if size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
            # A former line was cut short, such as by a full disk; it must not spoil this one.
            line = b"\n" + line
        if stream.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(stream.fileno())


def read_events(path: Path, schema: type[T], *, ignore_unknown: bool = False) -> list[T]:
    """Return the events of a file in order, without lines that a crash has cut short.

    Args:
        path: the file; without it there are no events.
        schema: type of an event; other lines are skipped.
        ignore_unknown: keep events with keys that a ``TypedDict`` does not have.
    """
    events = []
    if path.exists():
        for number, line in enumerate(read_regular(path, MAX_RECORD_BYTES).splitlines(), start=1):
            try:
                event = parse_json(
                    line, schema, f"{path}:{number}", "an event",
                    remedy="the line is ignored", ignore_unknown=ignore_unknown,
                )  # fmt: skip
            except DataError as error:
                logger.debug("%s", error)
                continue
            events.append(event)
    return events

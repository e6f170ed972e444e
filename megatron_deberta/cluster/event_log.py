"""JSON lines that outlive a crash: each is flushed, and damaged ones are skipped."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron_deberta.errors import DataError
from megatron_deberta.files import MAX_RECORD_BYTES, read_regular
from megatron_deberta.observe.metrics import append_line
from megatron_deberta.parsing import parse_json

T = TypeVar("T")

logger = logging.getLogger(__name__)


def append_event(path: Path, event: Mapping[str, Any]) -> None:
    """Append a line durably, and as a whole beside those of other processes.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, json.dumps(event).encode(), is_shared=True)


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

"""The error at the end of a rank's log."""

from __future__ import annotations

import re
from pathlib import Path

_TAIL_BYTES = 1 << 16
_ERROR = re.compile(
    r"(?:\[rank\d+\]: )?(?:[A-Za-z_][\w.]*(?:Error|Exception)\b|megatron-deberta: )"
)
_MAX_CHARACTERS = 300


def last_error(log: Path) -> str:
    """Return the last line of a log that names an error, cut to 300 characters; empty: none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    found = next((line for line in reversed(lines) if _ERROR.match(line)), "")
    return found.removeprefix("megatron-deberta: ").strip()[:_MAX_CHARACTERS]


def same_error(first: str, second: str) -> bool:
    """Return whether two errors are the same up to numbers, such as ports and addresses."""
    return bool(first) and _without_numbers(first) == _without_numbers(second)


def _without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)

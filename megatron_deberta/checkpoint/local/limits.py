"""Calls that may hang on a disk, with a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

LISTING_SECONDS = 30.0
"""Limit of listing or deleting the parts on a node."""
SLOWEST_BYTES_PER_SECOND = 10e6
"""Slower reads of parts count as hung."""


def within(seconds: float, call: Callable[[], _T], default: _T) -> _T:
    """Return the result of a call, or ``default`` if it takes longer than ``seconds``.

    The call goes on in a daemon thread, because a system call cannot be interrupted.

    Args:
        seconds: time limit in seconds.
        call: function to call.
        default: result if the call takes longer.

    Raises:
        Exception: what the call raised in time.
    """
    results: list[_T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="disk", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results[0] if results else default

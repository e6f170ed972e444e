"""Parent-death signal."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Kill this process when the thread that forked it exits (Linux).

    A forked child also holds the parent's open sockets, so that peers do not notice the parent's
    death while the child lives.

    Args:
        parent: process id of the parent, which may have exited already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

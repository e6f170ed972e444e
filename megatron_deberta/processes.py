"""What a process owes to the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as the thread that forked it is gone (Linux).

    A fork also holds the parent's open sockets: while it lives, those at their other ends do not
    notice that the parent is dead.

    Args:
        parent: process id of the parent, which may be dead already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

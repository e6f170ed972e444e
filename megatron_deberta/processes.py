"""Parent-death signal, and the limit of open files."""

from __future__ import annotations

import ctypes
import os
import resource
import signal

_PR_SET_PDEATHSIG = 1
_OPEN_FILES = 65_536


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


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to 65,536, or else to the hard limit.

    Many systems start processes with a soft limit of 1,024, too low for the sockets and loader
    processes of a large run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

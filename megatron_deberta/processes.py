"""Parent-death signal, the limit of open files, and calls in a thread."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")
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


def call_in_thread(call: Callable[[], _T], name: str) -> Future[_T]:
    """Call a function in a daemon thread, which does not delay the exit of the process.

    Args:
        call: function to call; a system call in it cannot be interrupted.
        name: of the thread.

    Returns:
        Its result, or the exception that it raised.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future

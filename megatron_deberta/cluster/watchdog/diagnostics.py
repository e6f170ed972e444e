"""Where does a process stand that does not move? Its stacks, and what ``/proc`` says of it.

Owns signals, ``py-spy`` and the reading of ``/proc``. Refuses to decide anything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_deberta.cluster.watchdog.hang import STOPPED_STATES
from megatron_deberta.cluster.watchdog.heartbeat import DUMP_SIGNAL, beat_path, stacks_path

DUMP_SECONDS = 1.5
"""How long ranks may take to write their stacks."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.M)
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/")
"""Python that waits for other ranks ends in a file of these folders."""
_READ = "0"
"""Number of the system call ``read`` on x86-64."""
_PY_SPY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where a process stands."""

    state: str
    """As in ``/proc/PID/stat``."""
    waiting: bool | None
    """The innermost frame is a collective's; None without a stack."""
    detail: str
    """In words."""
    stacks: str
    """What was dumped; empty if nothing could be."""


def gather(folder: Path, pids: Mapping[int, int]) -> dict[int, Evidence]:
    """Look at processes of this node.

    Args:
        folder: where their heartbeats and stacks are.
        pids: process by rank.

    Returns:
        What is found, by rank, within about two seconds.
    """
    before: dict[int, int] = {}
    for rank, pid in pids.items():
        path = stacks_path(beat_path(folder, rank))
        # A process that has not come so far yet would die of the signal; a stopped one is deaf.
        ready = path.exists() and beat_path(folder, rank).exists()
        if ready and process_state(pid) not in STOPPED_STATES:
            before[rank] = path.stat().st_size
            with suppress(ProcessLookupError):
                os.kill(pid, DUMP_SIGNAL)
    deadline = time.monotonic() + DUMP_SECONDS
    dumped: dict[int, str] = {}
    while len(dumped) < len(before) and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank, size in before.items():
            text = stacks_path(beat_path(folder, rank)).read_bytes()[size:].decode(errors="replace")
            # faulthandler writes the main thread last.
            if text.endswith("\n") and "Current thread" in text:
                dumped[rank] = text
    return {
        rank: _look(pid, dumped.get(rank) or _py_spy(pid), rank in dumped)
        for rank, pid in pids.items()
    }


def _look(pid: int, stacks: str, is_dump: bool) -> Evidence:
    state = process_state(pid)
    place = _system_call(pid)
    frames = _innermost(stacks) if is_dump else []
    waiting = any(part in frames[0] for part in _COLLECTIVES) if frames else None
    words = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "stuck in the kernel"}
    parts = [words.get(state, ""), place, f"at {frames[0]}" if frames else ""]
    return Evidence(state, waiting, ", ".join(part for part in parts if part), stacks)


def _innermost(stacks: str) -> list[str]:
    """Frames of the thread that answered, innermost first, as ``file:line function``."""
    _, _, current = stacks.rpartition("Current thread")
    return [f"{m['file']}:{m['line']} {m['function']}" for m in _FRAME.finditer(current)]


def process_state(pid: int) -> str:
    """The letter of ``/proc/PID/stat``; ``X`` if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def _system_call(pid: int) -> str:
    """What the kernel does for a process, as far as it may be known; empty if it may not."""
    found = []
    with suppress(OSError):
        number, *values = Path(f"/proc/{pid}/syscall").read_text().split()
        if number == _READ:
            found.append(f"reading {os.readlink(f'/proc/{pid}/fd/{int(values[0], 16)}')}")
    with suppress(OSError):
        channel = Path(f"/proc/{pid}/wchan").read_text().strip("0\n ")
        if channel:
            found.append(f"in {channel}")
    return ", ".join(found)


def _py_spy(pid: int) -> str:
    """Stacks of a process that cannot write them itself; empty where py-spy is not installed."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True, text=True, timeout=_PY_SPY_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout

"""Diagnostics of a process without progress: its threads' stacks and its ``/proc`` state."""

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
from megatron_deberta.cluster.watchdog.heartbeat import (
    DUMP_SIGNAL,
    beat_path,
    read_beat,
    stacks_path,
)

DUMP_SECONDS = 1.5
"""Time for ranks to write their stacks."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.M)
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/")
"""The innermost Python frame of a rank in a collective is in a file of these folders."""


@dataclass(frozen=True, slots=True)
class ProcessDiagnostics:
    """State of a process."""

    state: str
    """As in ``/proc/PID/stat``."""
    waiting: bool | None
    """Whether the innermost frame is in a collective; None without a stack."""
    detail: str
    stacks: str


def collect(folder: Path, pids: Mapping[int, int]) -> dict[int, ProcessDiagnostics]:
    """Collect diagnostics of this node's ranks, within about two seconds.

    Args:
        folder: folder of their heartbeats and stacks.
        pids: process by rank.
    """
    sizes: dict[int, int] = {}
    for rank, pid in pids.items():
        path = stacks_path(beat_path(folder, rank))
        # The signal would kill a process without a handler, and a stopped one does not get it.
        ready = read_beat(beat_path(folder, rank)) is not None
        if ready and process_state(pid) not in STOPPED_STATES:
            sizes[rank] = path.stat().st_size
            with suppress(ProcessLookupError):
                os.kill(pid, DUMP_SIGNAL)
    deadline = time.monotonic() + DUMP_SECONDS
    dumped: dict[int, str] = {}
    while len(dumped) < len(sizes) and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank, size in sizes.items():
            text = stacks_path(beat_path(folder, rank)).read_bytes()[size:].decode(errors="replace")
            # faulthandler writes the main thread last.
            if text.endswith("\n") and "Current thread" in text:
                dumped[rank] = text
    return {
        rank: _inspect(pid, dumped.get(rank) or _py_spy(pid), rank in dumped)
        for rank, pid in pids.items()
    }


def _inspect(pid: int, stacks: str, is_dump: bool) -> ProcessDiagnostics:
    state = process_state(pid)
    frames = _current_frames(stacks) if is_dump else []
    waiting = any(part in frames[0] for part in _COLLECTIVES) if frames else None
    states = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "stuck in the kernel"}
    parts = [states.get(state, ""), _system_call(pid), f"at {frames[0]}" if frames else ""]
    return ProcessDiagnostics(state, waiting, ", ".join(filter(None, parts)), stacks)


def _current_frames(stacks: str) -> list[str]:
    """Return the frames of the thread that wrote, innermost first, as ``file:line function``."""
    _, _, current = stacks.rpartition("Current thread")
    return [f"{m['file']}:{m['line']} {m['function']}" for m in _FRAME.finditer(current)]


def process_state(pid: int) -> str:
    """Return the letter of ``/proc/PID/stat``, ``X`` if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def _system_call(pid: int) -> str:
    """Return what a process does in the kernel, empty where this may not be read."""
    found = []
    with suppress(OSError):
        number, *values = Path(f"/proc/{pid}/syscall").read_text().split()
        # The system call ``read`` on x86-64.
        if number == "0":
            found.append(f"reading {os.readlink(f'/proc/{pid}/fd/{int(values[0], 16)}')}")
    with suppress(OSError):
        channel = Path(f"/proc/{pid}/wchan").read_text().strip("0\n ")
        if channel:
            found.append(f"in {channel}")
    return ", ".join(found)


def _py_spy(pid: int) -> str:
    """Return the stacks of a process that cannot write them, empty without py-spy."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True, text=True, timeout=1.0, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout

"""Processes of submitted runs, which tests suspend while they wait for SLURM."""

from __future__ import annotations

from pathlib import Path

import psutil


def ranks_of(run_dir: Path) -> list[psutil.Process]:
    """Return the processes of a run's ranks."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "pretrain" in (line := process.info["cmdline"] or [])
        and any(str(run_dir) in text for text in line)
    ]


def has_pending_signal(process: psutil.Process, number: int) -> bool:
    """Return whether a suspended process has received a signal, or has ended.

    SLURM continues suspended processes itself when it ends a job.
    """
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    (pending,) = (line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(pending, 16) >> (number - 1) & 1)

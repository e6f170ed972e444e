"""Where and with what a benchmark ran; goes into every result file."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def provenance() -> dict[str, str | int | None]:
    """Hardware, torch and revision of this run."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return {
        "hardware": processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "revision": subprocess.run(command, capture_output=True, text=True).stdout.strip(),
    }


def processor() -> str:
    """The processor's name as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")

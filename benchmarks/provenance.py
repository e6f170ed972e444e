"""Where and with what a benchmark ran; goes into every result file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def provenance(device: str = "cpu") -> dict[str, str | int | None]:
    """Hardware, versions and revision of this run.

    Args:
        device: ``cpu`` or ``cuda``; the hardware named is the one measured.
    """
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    record: dict[str, str | int | None] = {
        "hardware": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "revision": subprocess.run(command, capture_output=True, text=True).stdout.strip(),
        "source": source_digest(),
    }
    if device == "cuda":
        record["processor"] = record["hardware"]
        record["hardware"] = torch.cuda.get_device_name()
        record["triton"] = importlib.metadata.version("triton")
        record["cuda"] = torch.version.cuda
    return record


def source_digest() -> str:
    """Names the code that ran, also where it lies in no git repository."""
    digest = hashlib.sha256()
    for folder in ("megatron_deberta", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def processor() -> str:
    """The processor's name as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")

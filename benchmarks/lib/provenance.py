"""Hardware, versions and revision of a benchmark, added to every result file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def provenance(device: str = "cpu") -> dict[str, str | int | None]:
    """Return hardware, versions and revision of this run.

    Args:
        device: ``cpu`` or ``cuda``: the measured hardware.
    """
    record: dict[str, str | int | None] = {
        "hardware": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "revision": revision(),
        "source": source_digest(),
    }
    if device == "cuda":
        record["processor"] = record["hardware"]
        record["hardware"] = torch.cuda.get_device_name()
        record["cuda"] = torch.version.cuda
        for package in ("triton", "disentangled-flash", "flashdeberta"):
            record[package] = version(package)
    return record


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def program_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a program that imports this checkout.

    Args:
        variables: variables to set.

    Returns:
        This process's environment with these variables and the checkout first in ``PYTHONPATH``,
        whose other folders are kept: they may hold installed packages.
    """
    folders = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": folders, **variables}


def revision() -> str:
    """Return the commit, or an empty string without git or a repository."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def source_digest() -> str:
    """Return a digest of the code, which also identifies it outside of a git repository."""
    digest = hashlib.sha256()
    for folder in ("megatron_deberta", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def processor() -> str:
    """Return the processor's name from ``/proc/cpuinfo``."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")

"""Folders that all pytest-xdist workers of a session share: made once, then only read."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_folder(
    factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]
) -> Path:
    """Return a folder of this session, which the first worker that needs it fills.

    Args:
        factory: pytest's.
        name: of the folder.
        fill: writes the files; other workers wait meanwhile.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # The workers' folders are in that of the session.
    folder, finished = root / f"shared_{name}", root / f"shared_{name}.finished"
    with (root / f"shared_{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            fill(folder)
            finished.touch()
    return folder

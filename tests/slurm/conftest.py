"""A virtual cluster for the session; without SLURM the tests are skipped, or fail if required."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.virtual_cluster import VirtualCluster, missing_programs

REQUIRED = "MEGATRON_DEBERTA_REQUIRE_SLURM"
"""Environment variable that makes a missing SLURM a failure (set by .ci/run)."""


@pytest.fixture(scope="session")
def slurm() -> None:
    """Skip, or fail, without SLURM's programs."""
    missing = [*missing_programs(), *(["strace"] if shutil.which("strace") is None else [])]
    if not missing:
        return
    message = f"{', '.join(missing)} missing; enable with: sudo tests/slurm/install.sh"
    if os.environ.get(REQUIRED):
        pytest.fail(f"{message} ({REQUIRED} is set)")
    pytest.skip(message)


@pytest.fixture(scope="session")
def cluster(slurm: None) -> Iterator[VirtualCluster]:
    """Start a virtual cluster of four nodes."""
    # A short path instead of pytest's folder: names of Unix sockets are limited to 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="slurm."))
    # Without a handler, the daemons would survive a session that is terminated.
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM"))
    try:
        with VirtualCluster(folder) as cluster:
            yield cluster
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)

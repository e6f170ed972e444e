"""A virtual cluster for the session; without SLURM its tests skip, or fail where they must."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.virtual_cluster import VirtualCluster, missing_programs
from tests.support.jobs import prepare

REQUIRED = "MEGATRON_DEBERTA_REQUIRE_SLURM"
"""Set where a missing SLURM is a failure (.ci/run does)."""


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
    """Four nodes."""
    # Not pytest's own folder: names of Unix sockets may have 107 bytes only.
    folder = Path(tempfile.mkdtemp(prefix="slurm."))
    # Else the daemons would outlive a test session that is told to end.
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM"))
    try:
        with VirtualCluster(folder) as cluster:
            yield cluster
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def run_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps on real text."""
    return prepare(tmp_path_factory.mktemp("corpus"))

"""Installation of the packages that tests/judges compares with, and recording of the results.

Packages whose requirements differ from ours are installed under ``.venv/judges``, one folder per
list of requirements, by the first test that needs them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from benchmarks.judges.rows import write_row
from tests.support.jobs import ROOT, TIMEOUT

# Set to 1, the differences that tests measure are written as rows of the table.
RECORD = "MEGATRON_DEBERTA_RECORD_JUDGES"


def package_folder(*requirements: str) -> Path:
    """Install packages without their dependencies in a folder of their own.

    Args:
        requirements: what pip installs, with exact versions.

    Returns:
        The folder; put before ``sys.path`` or into ``PYTHONPATH`` it makes the packages importable.
    """
    name = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:12]
    base = ROOT / ".venv" / "judges"
    base.mkdir(parents=True, exist_ok=True)
    folder, stamp = base / name, base / f"{name}.stamp"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            command = [*pip, "--no-deps", "--upgrade", "--target", str(folder), *requirements]
            finished = subprocess.run(command, capture_output=True, text=True)
            assert finished.returncode == 0, f"{command}\n{finished.stdout}{finished.stderr}"
            stamp.write_text("\n".join(requirements) + "\n")
    return folder


@contextmanager
def importable(*requirements: str) -> Iterator[str]:
    """Make packages importable, before those of this environment; yield the first's version."""
    folder = package_folder(*requirements)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield version(folder, requirements[0].partition("==")[0])


def run_program(packages: Path, program: str, *arguments: str) -> Any:
    """Run a program that can import packages of a folder.

    Args:
        packages: result of `package_folder`; comes before the packages of this environment.
        program: Python code, whose last line of output is JSON.
        arguments: its arguments.

    Returns:
        The value of the last line of output.
    """
    variables = {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=packages,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def version(folder: Path, name: str) -> str:
    """Return the version of a package in a folder."""
    (found,) = {each.version for each in distributions(name=name, path=[str(folder)])}
    return found


def record(
    judge: str, release: str, compared: str, worst: str, limit: str, cases: int | None = None
) -> None:
    """Write the result of a comparison as a row of the table in docs/who-says-so.md.

    Nothing is written unless the environment variable ``MEGATRON_DEBERTA_RECORD_JUDGES`` is 1.

    Args:
        judge: name of the package or repository.
        release: its version or revision.
        compared: what was compared; with `judge`, the identity of the row.
        worst: the worst difference, or what was found.
        limit: what the test allows.
        cases: number of compared cases.
    """
    if os.environ.get(RECORD) == "1":
        write_row(judge, release, compared, worst, limit, cases)

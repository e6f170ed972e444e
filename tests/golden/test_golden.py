"""Results equal the frozen ones; see ``freeze.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden.freeze import ROOT, RUNS, compare

GOLDEN = Path(__file__).with_name("golden.json")
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TRITON_INTERPRET")
"""Variables of this process that must not reach a run."""


pytestmark = pytest.mark.slow
NIGHTLY = ("v1", "roberta", "1.5b_dp2")
"""Runs of ``--nightly`` only: ``1.5b`` also has twenty steps, and ``1.5b_tp2`` also two ranks."""
MARKS = dict.fromkeys(NIGHTLY, pytest.mark.nightly)
PARTS = [
    "shards",
    "deduplication",
    "plans",
    *(pytest.param(f"runs/{name}", marks=MARKS.get(name, ())) for name in RUNS),
    "exports/1.5b",
    pytest.param("exports/v1", marks=MARKS["v1"]),
]


@pytest.fixture(scope="module")
def frozen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Compute the fingerprints of the current code that the selected tests compare."""
    output = tmp_path_factory.mktemp("golden") / "now.json"
    variables = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    call = [sys.executable, "-m", "tests.golden.freeze", "--output", str(output)]
    tests = [item for item in request.session.items if item.path == request.path]
    names = {item.callspec.params["part"].rpartition("/")[2] for item in tests}
    call += ["--runs", *(name for name in RUNS if name in names)]
    done = subprocess.run(call, env=variables, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize("part", PARTS)
def test_fingerprints_equal_the_golden_file(frozen: dict[str, Any], part: str) -> None:
    """Tensors and metrics are compared bit by bit on the processor that wrote the golden file."""
    golden = json.loads(GOLDEN.read_text())
    exact = golden["environment"] == frozen["environment"]
    differences = compare(section(golden, part), section(frozen, part), exact=exact)
    assert not differences, "\n".join(differences[:50])


def section(fingerprints: dict[str, Any], part: str) -> dict[str, Any]:
    """Return a part of the fingerprints, or one run of ``runs`` or ``exports``."""
    name, _, run = part.partition("/")
    content = fingerprints[name]
    return {name: {run: content[run]} if run else content}

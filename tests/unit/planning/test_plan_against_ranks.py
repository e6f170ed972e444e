"""What the plan counts against dry runs of real ranks of a 256-rank grid."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planning.compare import CASES, ENGINES

ROOT = Path(__file__).parents[3]
MEMORY_TOLERANCE = 0.1
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tiny comparison, in a process of its own: it starts a process group of 256 ranks."""
    output = tmp_path_factory.mktemp("plan") / "plan.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.planning.compare",
        "tiny",
        "--output",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize("case", CASES["tiny"])
def test_ranks_are_what_was_planned(result: dict[str, Any], case: str) -> None:
    ranks = [row for row in result["ranks"] if row["case"] == case]
    assert [row["rank"] for row in ranks] == [0, 255]
    for row in ranks:
        assert row["found"] == row["planned"]
    (memory,) = [row for row in result["memory"] if row["case"] == case]
    assert memory["planned"] == pytest.approx(memory["found"], rel=MEMORY_TOLERANCE)


def test_the_last_rank_of_a_layer_has_fewer_tokens(result: dict[str, Any]) -> None:
    rows = {(row["case"], row["rank"]): row["vocabulary_rows"] for row in result["ranks"]}
    assert rows["tensor parallel", 0] == 256
    assert rows["tensor parallel", 255] == 232
    assert rows["no vocabulary left", 255] == 0


@pytest.mark.parametrize("case", ENGINES)
def test_deepspeed_sends_what_was_planned(result: dict[str, Any], case: str) -> None:
    (row,) = [row for row in result["engines"] if row["case"] == case]
    assert num_bytes(row["found"]) == num_bytes(row["planned"])


def num_bytes(collectives: dict[str, dict[str, int]]) -> dict[str, int]:
    return {kind: count["bytes"] for kind, count in collectives.items()}

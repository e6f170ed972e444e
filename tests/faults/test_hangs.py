"""A few cases of the hang campaign."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT


@pytest.mark.nightly
def test_stopped_rank_blocked_read_clean_run_and_slow_ranks(tmp_path: Path) -> None:
    output = tmp_path / "hangs.jsonl"
    # Numbers of cases with a fault in the first steps.
    cases = ["hang=8", "hang=47", "clean=0", "slow=0", "slow=1"]
    command = [sys.executable, "-m", "tests.faults.hangs", "--steps", "25", "--only", *cases]
    done = subprocess.run(
        [*command, "--output", str(output)],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["kind"], line["how"], line["ok"]) for line in lines] == [
        ("hang", "stop", True), ("hang", "read", True), ("clean", "nothing", True),
        ("slow", "slow", True), ("slow", "slow", True),
    ]  # fmt: skip

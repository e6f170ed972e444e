"""The first cases of the campaign of hangs: real ranks, stopped or blocked, named in time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.jobs import ROOT


def test_a_stopped_rank_a_blocked_read_a_clean_run_and_a_slow_rank(tmp_path: Path) -> None:
    output = tmp_path / "hangs.jsonl"
    for kind, numbers in (("cases", ("1", "5")), ("clean", ("0",)), ("slow", ("1",))):
        done = subprocess.run(
            [
                sys.executable, "-m", "tests.faults.hangs", f"--{kind}", "1",
                "--only", *numbers, "--output", str(output),
            ],
            cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["kind"], line["how"], line["ok"]) for line in lines] == [
        ("hang", "stop", True), ("hang", "read", True), ("clean", "nothing", True),
        ("slow", "slow", True),
    ]  # fmt: skip

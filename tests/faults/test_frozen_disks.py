"""A few cases of the campaign of frozen and full disks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.frozen_disks import KINDS, plan_case
from tests.support.jobs import ROOT

PROGRAMS = ("unshare", "mkfs.ext4", "fsfreeze", "strace")


def test_thirty_cases_have_every_kind_and_exceed_the_time_outs() -> None:
    plans = [plan_case(number) for number in range(30)]
    assert {plan["kind"] for plan in plans} == set(KINDS)
    assert min(plan["fault_seconds"] for plan in plans) > 8
    for kind in set(KINDS) - {"frozen mount of one node"}:
        assert max(plan["fault_seconds"] for plan in plans if plan["kind"] == kind) > 30


@pytest.mark.nightly
def test_frozen_and_full_disk(tmp_path: Path) -> None:
    can_mount = os.geteuid() == 0 and Path("/dev/loop-control").exists()
    if not can_mount or not all(map(shutil.which, PROGRAMS)):
        pytest.skip(f"needs root, loop devices and {', '.join(PROGRAMS)}")
    output = tmp_path / "disks.jsonl"
    command = [sys.executable, "-m", "tests.faults.frozen_disks", "--only", "0", "1"]
    done = subprocess.run(
        [*command, "--output", str(output)],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["kind"], line["ok"]) for line in lines] == [
        ("frozen disk", True), ("full disk", True),
    ]  # fmt: skip

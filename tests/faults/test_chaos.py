"""A few cases of every kind of the campaign ``tests.faults.chaos``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib.provenance import ROOT
from benchmarks.tables import faults
from benchmarks.tables.faults import CHAOS_CASES
from tests.faults.__main__ import CAMPAIGNS
from tests.faults.chaos.saves import SaveCases
from tests.faults.chaos.starts import StartCases
from tests.faults.chaos.training import TrainingCases
from tests.support.jobs import fork_server
from tests.support.selection import every

REQUIRED = "MEGATRON_DEBERTA_REQUIRE_SLURM"


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> SaveCases:
    return SaveCases(tmp_path_factory.mktemp("saves"), fork_server())


@pytest.fixture(scope="module")
def strace() -> None:
    if shutil.which("strace") is None:
        if os.environ.get(REQUIRED):
            pytest.fail("strace is missing: tests/slurm/install.sh")
        pytest.skip("strace is missing; apt-get install strace enables this")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_damaged_checkpoint_is_rejected_by_name(saves: SaveCases, seed: int) -> None:
    outcome = saves.damage(seed)
    assert outcome["ok"], outcome


@pytest.mark.slow
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("part", every(2, range(6), ["nightly"]))
def test_killed_save_keeps_an_intact_checkpoint(saves: SaveCases, part: int) -> None:
    outcome = saves.crash(part * len(saves.points()) // 6)
    assert outcome["ok"], outcome


@pytest.mark.slow
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("seed", range(4))
def test_failed_save_removes_its_files(saves: SaveCases, seed: int) -> None:
    outcome = saves.failure(seed)
    assert outcome["ok"], outcome


@pytest.mark.nightly
def test_second_start_without_flock_is_refused(run_yaml: Path, tmp_path: Path) -> None:
    outcome = StartCases(tmp_path, run_yaml).double(0)
    assert outcome["ok"], outcome


@pytest.mark.nightly
def test_four_ranks_resume_after_a_kill_and_a_signal(run_yaml: Path, tmp_path: Path) -> None:
    training = TrainingCases(tmp_path, run_yaml, steps=15)
    killed, stopped = training.kill_one(2), training.preempt(0)
    assert killed["ok"], killed
    assert stopped["ok"], stopped


def test_table_ignores_results_of_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    # test_campaign_digest.py covers the digest itself, which takes seconds.
    monkeypatch.setattr(faults, "code_digest", lambda places: f"digest of {places[0]}")
    code = CHAOS_CASES["damage"].digest()
    line = {"case": "damage", "ok": True, "revision": "abc", "hardware": "a CPU"}
    table = faults.chaos([{**line, "seed": 0, "code": code}, {**line, "seed": 1, "code": "other"}])
    row = f"| {CHAOS_CASES['damage'].title} (`chaos damage`) | 1 / 1 | 1000 |  | abc | a CPU |"
    assert row in table.splitlines()
    assert "(`chaos kill-one`) | not run | 200 |" in table


@pytest.mark.slow
def test_one_command_runs_every_campaign() -> None:
    files = [path for path in Path(__file__).parent.glob("*.py") if "test_" not in path.name]
    found = {path.stem for path in files if "\nif __name__ ==" in path.read_text()}
    # The command itself, and those whose result files are not by case.
    found -= {"__main__", "phases", "formats", "shard_damage"}
    assert found | {"chaos"} == set(CAMPAIGNS)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults", "mutants", "--seconds", "0"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stdout.endswith("mutants: not started\n")

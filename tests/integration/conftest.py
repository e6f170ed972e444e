"""One corpus and one uninterrupted run, which tests of this folder compare with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_deberta.cli.main import main
from tests.support.jobs import ROOT, TIMEOUT, Run, known_matmul_rate, without_launcher
from tests.support.shared import shared_folder

STEPS = 36
"""Of the run that others are compared with."""


@pytest.fixture(scope="session")
def uninterrupted(run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run on two data-parallel ranks under torchrun.

    It ends at step ``STEPS`` of 60.
    """

    def train(folder: Path) -> None:
        run_dir = folder / "run"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        program = ["--nproc-per-node=2", "-m", "megatron_deberta", "pretrain", str(run_yaml)]
        finished = subprocess.run(
            [*launcher, *program, f"train.run_dir={run_dir}", f"train.exit_step={STEPS}"],
            env=without_launcher() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        (run_dir / "stdout.txt").write_text(finished.stdout)

    return shared_folder(tmp_path_factory, "uninterrupted", train) / "run"


@pytest.fixture(autouse=True)
def _known_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_deberta.train.setup.measure_matmul_rate", known_matmul_rate)


@pytest.fixture(autouse=True)
def _own_process_settings() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture
def pretrain(run_yaml: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process; returns its exit code and standard error."""

    def run(*arguments: str, run_dir: str = "run") -> tuple[int, str]:
        folder = f"train.run_dir={tmp_path / run_dir}"
        short = ("parallel.engine=plain", "train.exit_step=2", "train.eval_every=null")
        quiet = ("data.num_workers=0", "log.level=warning", "data.sample_log=false")
        code = main(["pretrain", str(run_yaml), folder, *short, *quiet, *arguments])
        # The corpus is so small that 5 % of its documents are another share of its tokens.
        lines = capfd.readouterr().err.splitlines(keepends=True)
        return code, "".join(line for line in lines if "validation_fraction=0.05 holds" not in line)

    return run

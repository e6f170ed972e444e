"""The GPU suite with small sizes on the CPU: everything except the CUDA kernels.

Two parts run as the suite runs them, each in a process of its own; the others in this process, and
the commands that they start are forked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import learn, one_step, peers, smoke, step, train
from benchmarks.gpu.record import Options, Record, result_path
from tests.support.jobs import ForkedRank, fork_server

ROOT = Path(__file__).parents[2]
GPU_IMAGE_PYTHON = "MEGATRON_DEBERTA_GPU_IMAGE_PYTHON"
"""Environment variable: interpreter with the packages of a GPU image (docs/benchmarks.md)."""
SUITE = [sys.executable, "-m", "benchmarks.gpu.suite"]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*SUITE, "--out", str(folder / "out"), "--work", str(folder / "work"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def assert_passed(content: dict[str, Any]) -> None:
    assert content["items"]
    assert not content["left"]
    for item in content["items"].values():
        assert not item.get("wrong"), item
        assert "error" not in item, item


@pytest.mark.nightly
def test_parts_run_in_processes_and_pass(tmp_path: Path) -> None:
    parts = ("attention", "parity")
    done = run(tmp_path, "--device", "cpu", "--small", "--minutes", "20", "--part", *parts)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for part in parts:
        content = json.loads((tmp_path / "out" / f"{part}.json").read_text())
        assert_passed(content)
        assert f"  {part:10} {len(content['items'])} done" in done.stdout


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for shards and runs of all parts."""
    return tmp_path_factory.mktemp("work")


def fork_command(command: Sequence[str], log: Path) -> ForkedRank:
    """Start a command of the package like ``benchmarks.gpu.train.start``, but forked."""
    assert list(command[:3]) == [sys.executable, "-m", "megatron_deberta"]
    return ForkedRank({**os.environ, "OMP_NUM_THREADS": "1"}, list(command[3:]), log)


def fork_one_step(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Call ``benchmarks.gpu.one_step`` in a forked process."""
    assert list(command[:3]) == [sys.executable, "-m", "benchmarks.gpu.one_step"]
    process = fork_server().Process(target=measure_one_step, args=(list(command[2:]),))
    process.start()
    process.join()
    return subprocess.CompletedProcess(command, process.exitcode or 0, "", "")


def measure_one_step(arguments: list[str]) -> None:
    sys.argv = arguments
    one_step.main()


@pytest.mark.nightly
@pytest.mark.parametrize("part", [smoke, train, step, peers, learn])
def test_part_runs_and_passes(
    part: Any, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (train, step):
        monkeypatch.setattr(module, "start", fork_command)
    monkeypatch.setattr(train, "kill", lambda process: (process.kill(), process.wait()))
    monkeypatch.setattr(step, "subprocess", type("", (), {"run": staticmethod(fork_one_step)}))
    name = part.__name__.rpartition(".")[2]
    options = Options(
        part=name, out=tmp_path, work=work, device="cpu", small=True, minutes=20.0
    )  # fmt: skip
    record = Record(options)
    part.run(record)
    record.finish()
    content = json.loads(result_path(options).read_text())
    assert_passed(content)
    assert part.table(content["items"])


@pytest.mark.nightly
@pytest.mark.parametrize("packages", ["installed here", "of a GPU image"])
def test_first_contact_runs_on_a_cpu(packages: str, tmp_path: Path) -> None:
    """The script, every stage in a process of its own, with small sizes; then nothing is left."""
    environment = {**os.environ, "PYTHON": sys.executable, "CARRIED": str(tmp_path / "none")}
    if packages == "of a GPU image":
        if GPU_IMAGE_PYTHON not in os.environ:
            pytest.skip(f"{GPU_IMAGE_PYTHON} names no interpreter")
        carried = os.environ.get("CARRIED", str(ROOT / ".first_contact"))
        environment |= {"PYTHON": os.environ[GPU_IMAGE_PYTHON], "CARRIED": carried}
    command = [ROOT / "launch" / "gpu_first_contact.sh", "--device", "cpu", "--small"]
    command += ["--out", tmp_path / "out", "--work", tmp_path / "work", "--total-seconds", "3600"]
    for kept in (False, True):
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        lines = (tmp_path / "out" / "stages.jsonl").read_text().splitlines()
        stages = [json.loads(line) for line in lines]
        assert {stage["state"] for stage in stages} == {"passed"}
        assert len(stages) == 9
        assert all(stage.get("kept", False) is kept for stage in stages)
    files = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert len(files) <= 6
    assert max(files.values()) <= 16 * 2**20
    assert {"stages.jsonl", "summary.txt", "logs.tar.xz", "trace.json.gz"} <= set(files)


def test_missing_gpu_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path, "--part", "attention")
    assert done.returncode == 2
    assert "no GPU found" in done.stderr

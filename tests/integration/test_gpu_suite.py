"""The GPU suite with small sizes on the CPU: everything except the CUDA kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.suite import PARTS
from tests.support.jobs import ROOT

GPU_IMAGE_PYTHON = "MEGATRON_DEBERTA_GPU_IMAGE_PYTHON"
"""Environment variable: interpreter with the packages of a GPU image (docs/benchmarks.md)."""
SUITE = [sys.executable, "-m", "benchmarks.gpu.suite"]


def run(folder: Path, work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*SUITE, "--out", str(folder / "out"), "--work", str(work), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for shards and runs of all parts."""
    return tmp_path_factory.mktemp("work")


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
def test_part_runs_in_its_process_and_passes(part: str, work: Path, tmp_path: Path) -> None:
    done = run(tmp_path, work, "--device", "cpu", "--small", "--minutes", "20", "--part", part)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    content = json.loads((tmp_path / "out" / f"{part}.json").read_text())
    assert content["items"]
    assert not content["left"]
    for item in content["items"].values():
        assert not item.get("wrong"), item
        assert "error" not in item, item
    assert f"  {part:10} {len(content['items'])} done" in done.stdout


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
    done = run(tmp_path, tmp_path / "work", "--part", "attention")
    assert done.returncode == 2
    assert "no GPU found" in done.stderr

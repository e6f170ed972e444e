"""The GPU suite with small sizes on the CPU: everything except the CUDA kernels."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE = [sys.executable, "-m", "benchmarks.gpu.suite"]
PARTS = ("attention", "parity", "train", "step", "peers", "learn")


def run(folder, *arguments):
    command = [*SUITE, "--out", str(folder / "out"), "--work", str(folder / "work"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_all_parts_run_and_pass(tmp_path):
    done = run(tmp_path, "--device", "cpu", "--small", "--minutes", "20")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for part in PARTS:
        content = json.loads((tmp_path / "out" / f"{part}.json").read_text())
        assert content["items"]
        assert not content["left"]
        assert f"  {part:10} {len(content['items'])} done" in done.stdout
        for item in content["items"].values():
            assert not item.get("wrong"), item
            assert "error" not in item, item


def test_missing_gpu_is_reported(tmp_path):
    done = run(tmp_path, "--part", "attention")
    assert done.returncode == 2
    assert "no GPU found" in done.stderr

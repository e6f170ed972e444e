"""The whole GPU suite, small and on the CPU: everything but the CUDA kernels themselves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE = [sys.executable, str(ROOT / "benchmarks" / "gpu_suite.py"), "--device", "cpu", "--small"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    return ["--out", str(folder / "out"), "--work", str(folder / "work")]


def run(folders, *arguments):
    return subprocess.run([*SUITE, *folders, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("part", ["attention", "parity", "train", "step", "peers", "learn"])
def test_part(folders, part):
    done = run(folders, "--part", part)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    content = json.loads((Path(folders[1]) / f"{part}.json").read_text())
    assert content["items"]
    assert not content["left"]
    assert f"  {part:10} {len(content['items'])} done" in done.stdout
    for item in content["items"].values():
        assert not item.get("wrong"), item
        assert "error" not in item, item
    if part == "attention":
        again = run(folders, "--part", part)
        assert again.returncode == 0
        assert ": done in" not in again.stdout


def test_without_a_gpu_it_says_so(folders):
    command = [*SUITE[:2], *folders, "--part", "attention"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no GPU here" in done.stderr

"""``launch/finetune_demo.sh`` with a tiny model: from one CSV file to printed predictions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "launch" / "finetune_demo.sh"
MODEL = ROOT / "tests" / "golden" / "c6955b0" / "hf"


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(DEMO), *arguments], capture_output=True, text=True, cwd=ROOT, env=environment
    )


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="the script would install packages")
def test_one_file_becomes_predictions(tmp_path: Path) -> None:
    rows = [
        f"the {'cat' if n % 2 else 'dog'} sat {n},{'early' if n % 2 else 'late'}" for n in range(60)
    ]
    (tmp_path / "own.csv").write_text("\n".join(["body,kind", *rows]) + "\n")
    output = tmp_path / "demo"
    done = demo(
        "--data", str(tmp_path / "own.csv"), "--labels", "early,late", "--text", "body",
        "--label", "kind", "--model", str(MODEL), "--output", str(output), "train.steps=2",
        "train.device=cpu", "log.tensorboard=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (output / "predictions.jsonl").read_text().splitlines()
    assert len(lines) > 2
    shown = done.stdout.partition("== 3/3")[2]
    assert sum(": the " in line and "%" in line for line in shown.splitlines()) == len(lines)


def test_mistakes_end_before_anything_is_written(tmp_path: Path) -> None:
    file, output = tmp_path / "own.csv", tmp_path / "demo"
    file.write_text("text,label\na,b\n")
    common = ("--model", str(MODEL), "--output", str(output))
    for arguments, message in (
        ((), "--data is missing"),
        (("--data", str(tmp_path / "none.csv")), "does not exist"),
        (("--data", str(file)), "--labels is missing"),
        (("--data", str(tmp_path)), "is a folder; give --task"),
        (("--data", str(file), "--labels", "b", "--model", "none"), "run launch/quickstart.sh"),
        (("--label",), "--label needs a value"),
    ):
        done = demo(*common, *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not output.exists()
    assert "--labels A,B" in demo("--help").stdout

"""The scripts in examples/ run as documented, each in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OLD_RUN = ROOT / "tests/golden/c6955b0"


def run(script: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_in_forty_lines() -> None:
    losses = [float(line.split()[-1]) for line in run("train_in_forty_lines.py", "40").splitlines()]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 2


def test_attention_operator() -> None:
    assert "output [2, 100, 64]" in run("attention_operator.py")


def test_shards_dataloader() -> None:
    random = run("shards_dataloader.py").splitlines()
    assert random[1] == "input_ids [4, 128], 76 masked tokens"
    shard = (str(OLD_RUN / "shards/docs_text_document"), str(OLD_RUN / "tokenizer"))
    assert run("shards_dataloader.py", *shard).startswith("9,059 tokens")


def test_fill_mask_from_run() -> None:
    text = "The [MASK] of [MASK]."
    shown = run("fill_mask_from_run.py", str(OLD_RUN / "run"), text, str(OLD_RUN / "tokenizer"))
    assert len(shown.splitlines()) == 10
    assert shown.startswith("position 2: ")

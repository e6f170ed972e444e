"""The scripts in examples/ run as documented."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD_RUN = ROOT / "tests/golden/c6955b0"
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a script in this process and returns its output."""

    def run(script: str, *arguments: str) -> str:
        path = str(ROOT / "examples" / script)
        monkeypatch.setattr("sys.argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


def test_train_in_forty_lines(run: Run) -> None:
    losses = [float(line.split()[-1]) for line in run("train_in_forty_lines.py", "40").splitlines()]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 2


def test_attention_operator(run: Run) -> None:
    assert "output [2, 100, 64]" in run("attention_operator.py")


def test_shards_dataloader(run: Run) -> None:
    random = run("shards_dataloader.py").splitlines()
    assert random[1] == "input_ids [4, 128], 76 masked tokens"
    shard = (str(OLD_RUN / "shards/docs_text_document"), str(OLD_RUN / "tokenizer"))
    assert run("shards_dataloader.py", *shard).startswith("9,059 tokens")


def test_fill_mask_from_run(run: Run) -> None:
    text = "The [MASK] of [MASK]."
    shown = run("fill_mask_from_run.py", str(OLD_RUN / "run"), text, str(OLD_RUN / "tokenizer"))
    assert len(shown.splitlines()) == 10
    assert shown.startswith("position 2: ")

"""A search on a tiny model: killed and started again; comparison and ensemble of its runs."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE
from tests.support.jobs import recorded_steps
from tests.support.tiny_task import MODEL, write_task

SECONDS = 240.0
STEPS = 20


@pytest.fixture
def search_file(tmp_path: Path) -> Path:
    data = write_task(tmp_path / "data")
    grid = {
        "optimizer.learning_rate": [3e-3], "optimizer.warmup_steps": 0, "train.steps": STEPS,
        "train.eval_every": 10, "train.global_batch_size": 8, "train.device": "cpu",
        "checkpoint.save_every": 4, "parallel.engine": "plain", "log.every": 1,
        "log.tensorboard": False,
    }  # fmt: skip
    values = {
        "task": str(data / "task.yaml"), "model": str(MODEL), "data": str(data), "seeds": 2,
        "output": str(tmp_path / "out"), "grid": grid,
    }  # fmt: skip
    path = tmp_path / "search.yaml"
    path.write_text(json.dumps(values))
    return path


def processes(text: str) -> list[psutil.Process]:
    return [
        p for p in psutil.process_iter(["cmdline"]) if text in " ".join(p.info["cmdline"] or ())
    ]


@pytest.mark.slow
def test_a_killed_search_resumes_and_its_runs_are_compared(
    search_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = search_file.parent / "out"
    folders = [output / "cells" / "learning_rate=0.003" / f"seed_{seed}" for seed in (1, 2)]
    # A fork of this process, which has imported what the command needs.
    if (process := os.fork()) == 0:
        try:
            main(["search", str(search_file), "--jobs", "1"])
        finally:
            os._exit(1)
    deadline = time.monotonic() + SECONDS
    while max(recorded_steps(folders[0]), default=0) < 6:
        assert os.waitpid(process, os.WNOHANG) == (0, 0)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    # The run dies with the search.
    while processes(str(folders[0])):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert max(recorded_steps(folders[0])) < STEPS
    assert not folders[1].exists()

    assert main(["search", str(search_file), "--jobs", "2"]) == EXIT_DONE
    assert "2 of 2 runs finished" in capsys.readouterr().out
    for folder in folders:
        assert recorded_steps(folder) == list(range(1, STEPS + 1))
    logs = [(folder / "search.log").stat().st_mtime for folder in folders]
    assert "resum" in (folders[0] / "search.log").read_text()
    assert main(["search", str(search_file)]) == EXIT_DONE
    assert [(folder / "search.log").stat().st_mtime for folder in folders] == logs

    scores = json.loads((output / "results.json").read_text())["cells"][0]["scores"]
    capsys.readouterr()
    report = search_file.parent / "compare.json"
    sides = [str(output), str(folders[0])]
    assert main(["compare", *sides, "--output", str(report), "--resamples", "200"]) == EXIT_DONE
    (found,) = json.loads(report.read_text())
    assert found["a"] == pytest.approx([scores["1"], scores["2"]])
    assert found["b"] == pytest.approx([scores["1"]])
    assert found["num_examples"] == 11

    predictions = search_file.parent / "test.jsonl"
    arguments = ["--best", "1", "--output", str(predictions)]
    capsys.readouterr()
    assert main(["ensemble", str(output), *arguments]) == EXIT_DONE
    shown = capsys.readouterr().out
    assert f"ensemble of the best 1 {max(scores.values()):.4f}" in shown
    assert len(predictions.read_text().splitlines()) == 5
    assert main(["ensemble", str(output), "--best", "3"]) != EXIT_DONE
    assert "there are only 2 runs" in capsys.readouterr().err

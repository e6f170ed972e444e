"""The fine-tuning study: cells, their configs, resumption, and the comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learn import finetune_study as study
from benchmarks.lib.provenance import ROOT
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE
from megatron_deberta.evaluate.models import open_source_model
from megatron_deberta.finetune.settings import finetune_config

RUN = ROOT / "tests" / "golden" / "c6955b0" / "run"
TOKENIZER = RUN.parent / "tokenizer"


def of(folder: Path, **changes: Any) -> study.Study:
    options = {"tasks": study.TASKS, **changes}
    return study.Study(RUN, folder / "corpus", folder / "work", folder / "out.json", **options)


def test_cells_begin_with_both_starts_of_every_task(tmp_path: Path) -> None:
    cells = of(tmp_path).cells()
    assert len(cells) == len({cell.key for cell in cells}) == 60
    assert [cell.start for cell in cells[:4]] == ["pretrained", "random"] * 2
    assert {cell.task.name for cell in cells[:20]} == {task.name for task in study.TASKS}
    assert {cell.seed for cell in cells[:20]} == {1}


@pytest.mark.parametrize("task", study.TASKS, ids=lambda task: task.name)
def test_settings_of_both_starts_differ_in_the_weights_only(
    tmp_path: Path, task: study.Task
) -> None:
    model = open_source_model(RUN, str(TOKENIZER))
    configs = {}
    for start in study.STARTS:
        words = of(tmp_path).arguments(study.Cell(task, start, 3))
        data = words[words.index("--data") + 1]
        overrides = [word for word in words[1:] if "=" in word and not word.startswith("-")]
        configs[start] = finetune_config(words[1], model, data, overrides, settings="none")
    pretrained, random = configs["pretrained"], configs["random"]
    assert (bool(pretrained.checkpoint.load_from), random.checkpoint.load_from) == (True, None)
    assert pretrained.train.seed == 3
    assert pretrained.train.run_dir != random.train.run_dir
    for section in ("model", "optimizer", "data", "finetune", "precision"):
        assert getattr(pretrained, section) == getattr(random, section)


def test_finished_cells_are_skipped_and_late_ones_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    codes = {"random-2": EXIT_REQUEUE}

    def run(self: study.Processes, arguments: list[str], log: Path) -> tuple[int, float]:
        log.parent.mkdir(parents=True, exist_ok=True)
        started.append(log.parent.name)
        record = {"step": 7, "kind": "validation", "loss": 0.5, "accuracy": 0.75, "score": 0.75}
        (log.parent / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return codes.get(log.parent.name, EXIT_DONE), 1.5

    monkeypatch.setattr(study.Processes, "run", run)
    task = study.Task("sst2", "data", 2, 1)
    short = of(tmp_path, tasks=(task,), blimp_checkpoints=0)
    record = study.execute(short, 1, 100.0)
    assert started == ["pretrained-1", "random-1", "pretrained-2", "random-2"]
    assert list(record["cells"]) == ["sst2/pretrained-1", "sst2/random-1", "sst2/pretrained-2"]
    assert record["cells"]["sst2/random-1"]["metrics"] == {"loss": 0.5, "accuracy": 0.75}
    started.clear()
    codes.clear()
    assert study.execute(short, 1, -1.0)["cells"].keys() == record["cells"].keys()
    assert started == []
    assert "sst2/random-2" in study.execute(short, 1, 100.0)["cells"]
    assert started == ["random-2"]
    assert json.loads(short.output.read_text())["pretraining_steps"] > 0


def test_a_failed_cell_ends_the_study(tmp_path: Path) -> None:
    processes = study.Processes()
    with pytest.raises(SystemExit, match="ended with exit code"):
        processes.run(["no-such-command"], tmp_path / "log")


def test_starts_are_compared_over_seeds() -> None:
    scores = {"pretrained": (0.80, 0.82, 0.84), "random": (0.70, 0.75, 0.71)}
    cells = [
        {"task": "sst2", "start": start, "score": score}
        for start, values in scores.items()
        for score in values
    ]
    cells += [{"task": "mrpc", "start": start, "score": 0.5} for start in study.STARTS]
    cells += [{"task": "alone", "start": "random", "score": 0.5}]
    first, second = study.compare(cells)
    assert first["pretrained"]["mean"] == pytest.approx(0.82)
    assert first["pretrained"]["stdev"] == pytest.approx(0.02)
    assert first["difference"] == pytest.approx(0.1)
    # t = 0.1 / sqrt(0.0004 / 3 + 0.0007 / 3) with 3.72 degrees of freedom
    assert first["p"] == pytest.approx(0.0078, rel=0.01)
    assert (second["task"], second["p"]) == ("mrpc", None)

"""Thresholds of labels: read from a checkpoint, an export or a task, and found for an ensemble."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_deberta.checkpoint.layout import step_dir
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.evaluate import outputs as outputs_module
from megatron_deberta.evaluate.models import SourceModel
from megatron_deberta.evaluate.outputs import FinetunedRun, build_ensemble
from megatron_deberta.evaluate.splits import Split
from megatron_deberta.evaluate.thresholds import (
    checkpoint_thresholds,
    model_thresholds,
    thresholds_by_name,
)
from megatron_deberta.tasks import Example, TaskConfig, score
from megatron_deberta.tasks.scoring import with_best_thresholds
from tests.support.labelled import encoded
from tests.support.task_files import make_task

TASK = make_task("multilabel", "micro_f1", labels=["a", "b", "c"], label_names=["A", "B", "C"])


def source(path: Path, fields: dict[str, Any], run: RunConfig | None = None) -> SourceModel:
    return SourceModel(path, RunConfig().model, "", run, lambda name: None, fields=fields)  # type: ignore[arg-type, return-value]


def record(run_dir: Path, step: int, *thresholds: float) -> None:
    classes = [{"name": n, "threshold": t} for n, t in zip("ABC", thresholds, strict=False)]
    with (run_dir / "class_scores.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": step, "classes": classes}) + "\n")


def test_thresholds_of_a_checkpoint_are_of_its_own_validation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    for step in (4, 8):
        record(tmp_path, step, 0.1, 0.2, step / 10)
    run = RunConfig()
    assert model_thresholds(TASK, source(step_dir(tmp_path, 4), {}, run)).thresholds[2] == 0.4
    found = checkpoint_thresholds(TASK, step_dir(tmp_path, 8))
    assert thresholds_by_name(found) == {"A": 0.1, "B": 0.2, "C": 0.8}
    given = replace(TASK, thresholds=(0.6,))
    assert checkpoint_thresholds(given, step_dir(tmp_path, 8)) is given
    assert thresholds_by_name(given) == {"A": 0.6, "B": 0.6, "C": 0.6}
    assert not caplog.text
    # A checkpoint between two validations, or away from its run.
    for checkpoint in (step_dir(tmp_path, 6), tmp_path / "copies" / "step_00000008"):
        assert checkpoint_thresholds(TASK, checkpoint).thresholds == (0.5,) * 3
        assert f"{checkpoint} has no threshold for 3 of 3 labels (A)" in caplog.text
    assert checkpoint_thresholds(TASK, Path("best")).thresholds == (0.5,) * 3
    monkeypatch.chdir(tmp_path / "checkpoints")
    assert checkpoint_thresholds(TASK, Path("step_00000004")).thresholds == (0.1, 0.2, 0.4)
    other = make_task("classification", "accuracy")
    assert checkpoint_thresholds(other, step_dir(tmp_path, 8)) is other
    assert thresholds_by_name(other) == {}


def test_thresholds_of_an_export_belong_to_labels_by_name(tmp_path: Path) -> None:
    def found(thresholds: object) -> TaskConfig:
        return model_thresholds(TASK, source(tmp_path, {"label_thresholds": thresholds}))

    assert found({"C": 0.7, "A": 0.1, "B": 0.2}).thresholds == (0.1, 0.2, 0.7)
    assert found({"C": 0.7}).thresholds == (0.5, 0.5, 0.7)
    assert model_thresholds(TASK, source(tmp_path, {})).thresholds == (0.5,) * 3
    for wrong in ({"A": 1.5}, {"A": "0.5"}, [0.5, 0.5, 0.5], None):
        with pytest.raises(CheckpointError, match="label_thresholds=.*correct or remove it"):
            found(wrong)


def test_an_ensemble_has_thresholds_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded("multilabel")
    examples = [Example(id=str(n), tags=tuple(row)) for n, row in enumerate(data.labels.tolist())]
    random = np.random.default_rng(1)
    members = {
        name: (data.labels + random.normal(0, 1, data.labels.shape)).astype(np.float32) + shift
        for name, shift in (("low", -4.0), ("high", 3.0))
    }
    runs = [
        FinetunedRun(
            tmp_path / name,
            RunConfig(),
            with_best_thresholds(TASK, examples, data, values),
            tmp_path,
        )
        for name, values in members.items()
    ]
    split = Split(examples, data)
    monkeypatch.setattr(
        outputs_module, "read_outputs", lambda run, *_: (split, members[run.folder.name])
    )
    ensemble = build_ensemble(TASK, runs, 2)
    _, mean = ensemble.outputs("dev")
    odds = np.mean([1 / (1 + np.exp(-values)) for values in members.values()], axis=0)
    assert 1 / (1 + np.exp(-mean)) == pytest.approx(odds, abs=1e-6)
    assert ensemble.task.thresholds == with_best_thresholds(TASK, examples, data, mean).thresholds
    at_half = score(TASK, examples, data, mean)["micro_f1"]
    assert ensemble.metrics["micro_f1"] == pytest.approx(
        score(ensemble.task, examples, data, mean)["micro_f1"]
    )
    assert ensemble.metrics["micro_f1"] > at_half
    # A run is scored at its own thresholds, and those that a task states are kept.
    assert len(ensemble.scores) == 2
    for value, run in ensemble.scores:
        assert value == score(run.task, examples, data, members[run.folder.name])["micro_f1"]
    # One member has its own thresholds, whichever run stands first.
    for order in (runs, runs[::-1]):
        single = build_ensemble(order[0].task, order, 1)
        assert single.task.thresholds == single.members[0].task.thresholds
    pooled = [runs[0], replace(runs[1], task=replace(runs[1].task, long_text="max"))]
    with pytest.raises(ConfigError, match="different tokenizers, lengths, long_text or examples"):
        build_ensemble(TASK, pooled, 2)
    given = replace(TASK, thresholds=(0.3,))
    stated = [replace(run, task=given) for run in runs]
    assert build_ensemble(given, stated, 2).task.thresholds == (0.3,)

"""Which checkpoints ``finetune-checkpoints`` uses, and the curve of several of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, step_dir
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.finetune.checkpoint_curve import (
    CurvePoint,
    CurveRun,
    check_settings,
    curve_of,
    describe_curve,
    plan_runs,
    write_curve,
)
from megatron_deberta.observe.metrics import FILE_NAME

CHECKPOINT = Path(__file__).parents[2] / "golden" / "c6955b0" / "run" / "checkpoints"


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 10 to 50, and one that was not committed."""
    run_dir = tmp_path / "pretrained"
    for step in (10, 20, 30, 40, 50, 60):
        shutil.copytree(CHECKPOINT / "step_00000005", step_dir(run_dir, step))
    (step_dir(run_dir, 60) / COMMITTED_FILE).unlink()
    return run_dir


def finish(run: CurveRun, *scores: float) -> None:
    """Record the result of a run with one validation per score."""
    run.folder.mkdir(parents=True)
    lines = [
        {"kind": "validation", "step": number, "loss": 1.0, "score": score}
        for number, score in enumerate(scores, start=1)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.folder / FILE_NAME).write_text(text)
    run.record_result()


@pytest.mark.parametrize(
    ("every", "steps"), [(1, [10, 20, 30, 40, 50]), (2, [20, 40, 50]), (5, [50]), (9, [50])]
)
def test_every_nth_checkpoint_and_the_last(
    pretrained: Path, tmp_path: Path, every: int, steps: list[int]
) -> None:
    runs = plan_runs(pretrained, tmp_path / "out", every, 2)
    assert [(run.step, run.seed) for run in runs] == [(s, n) for s in steps for n in (1, 2)]
    assert all(run.checkpoint == step_dir(pretrained, run.step) for run in runs)
    assert len({run.folder for run in runs}) == len(runs)


def test_the_curve_has_the_best_scores_of_finished_runs(pretrained: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    runs = plan_runs(pretrained, output, 2, 2)
    assert curve_of(output) == []
    finish(runs[0], 0.5, 0.7, 0.6)
    finish(runs[1], 0.6)
    finish(runs[4], 0.9, 0.8)
    points = curve_of(output)
    assert [(p.step, p.scores) for p in points] == [(20, (0.7, 0.6)), (50, (0.9,))]
    assert points[0].mean == pytest.approx(0.65)

    write_curve(output, points, "sst2", "accuracy")
    content = json.loads((output / "curve.json").read_text())
    assert (content["task"], content["metric"]) == ("sst2", "accuracy")
    assert [(p["step"], p["mean"]) for p in content["points"]] == [
        (20, pytest.approx(0.65)),
        (50, 0.9),
    ]
    assert (output / "curve.png").read_bytes().startswith(b"\x89PNG")
    # Pretraining has gone on and has deleted a checkpoint: its result stays in the curve, the runs
    # of the new one are added, and no finished one is repeated.
    shutil.rmtree(step_dir(pretrained, 50))
    shutil.copytree(CHECKPOINT / "step_00000005", step_dir(pretrained, 70))
    longer = plan_runs(pretrained, output, 2, 2)
    assert {run.step for run in longer} == {20, 40, 70}
    assert [run.seed for run in longer if run.score is not None] == [1, 2]
    finish(longer[-1], 0.4)
    assert [p.step for p in curve_of(output)] == [20, 50, 70]


def test_other_settings_are_refused_where_runs_are(pretrained: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    check_settings(output, {"task": "sst2"})
    check_settings(output, {"task": "cola"})
    finish(plan_runs(pretrained, output, 9, 1)[0], 0.5)
    check_settings(output, {"task": "cola"})
    # Its checkpoint is no longer there.
    shutil.rmtree(step_dir(pretrained, 50))
    with pytest.raises(ConfigError, match="has runs with task='cola', not 'sst2'"):
        check_settings(output, {"task": "sst2"})


def test_the_table_has_mean_and_range() -> None:
    points = [CurvePoint(1000, 256_000, (0.5, 0.7)), CurvePoint(2000, 512_000, (0.8,))]
    header, *rows = describe_curve(points, "accuracy").splitlines()
    assert header.split() == ["step", "sequences", "seeds", "accuracy", "min", "max"]
    assert [row.split() for row in rows] == [
        ["1,000", "256,000", "2", "0.6000", "0.5000", "0.7000"],
        ["2,000", "512,000", "1", "0.8000", "0.8000", "0.8000"],
    ]


def test_runs_without_checkpoints_or_validation_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        plan_runs(tmp_path, tmp_path / "out", 1, 1)
    run = CurveRun(tmp_path, 10, 80, 1, tmp_path / "fine_tuned")
    with pytest.raises(ConfigError, match="no validation; use a task with a dev split"):
        finish(run)

"""Which checkpoints ``finetune-checkpoints`` uses, and the curve of several of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, step_dir
from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_USAGE, CheckpointError, ConfigError, DataError
from megatron_deberta.finetune.checkpoint_curve import (
    WEIGHTS_FILE,
    CurvePoint,
    CurveRun,
    check_settings,
    check_weights,
    curve_of,
    describe_curve,
    plan_runs,
    write_curve,
)
from megatron_deberta.finetune.inputs import fingerprint_inputs
from megatron_deberta.tasks.task import load_task
from tests.support.tiny_task import MODEL, write_finished_run, write_task

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
    write_finished_run(run.folder, *scores)
    assert run.record_result("accuracy")


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


def test_a_run_that_was_stopped_has_no_result(pretrained: Path, tmp_path: Path) -> None:
    (run,) = plan_runs(pretrained, tmp_path / "out", 9, 1)
    write_finished_run(run.folder, 0.5, 0.6, steps=3)
    assert not run.record_result("accuracy")
    assert run.score is None


def test_a_run_without_a_score_is_refused(pretrained: Path, tmp_path: Path) -> None:
    (run,) = plan_runs(pretrained, tmp_path / "out", 9, 1)
    write_finished_run(run.folder, 0.5)
    record = {"kind": "validation", "step": 1, "accuracy": None, "score": None}
    (run.folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match="accuracy at step 1 is infinite or not a number"):
        run.record_result("accuracy")


def test_other_weights_of_the_same_step_are_refused(pretrained: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    runs = plan_runs(pretrained, output, 2, 1)
    check_weights(output, runs)
    finish(runs[0], 0.5)
    check_weights(output, runs)
    # Pretraining was repeated. Only the first checkpoint was fine-tuned before.
    for step in (20, 50):
        (step_dir(pretrained, step) / COMMITTED_FILE).write_text("another\n")
    with pytest.raises(ConfigError, match="has runs with step_00000020="):
        check_weights(output, runs)
    check_weights(output, runs[1:])
    assert "another" in (output / WEIGHTS_FILE).read_text()


def test_other_data_tokenizer_or_task_of_the_same_name_are_refused(tmp_path: Path) -> None:
    data = write_task(tmp_path / "data")
    output = tmp_path / "out"
    task = load_task(str(data / "task.yaml"))
    check_settings(output, fingerprint_inputs(task, str(data), str(MODEL)))
    (output / "step_00000010-seed_1").mkdir()
    check_settings(output, fingerprint_inputs(task, str(data), str(MODEL)))
    other = replace(task, metrics=("f1",))
    with pytest.raises(ConfigError, match="has runs with task_fingerprint="):
        check_settings(output, fingerprint_inputs(other, str(data), str(MODEL)))
    for split in ("dev", "train"):
        path = data / f"{split}.tsv"
        before = path.read_text()
        path.write_text(before.replace("bad", "good", 1))
        with pytest.raises(ConfigError, match=r"data_fingerprint=.*; use another --output"):
            check_settings(output, fingerprint_inputs(task, str(data), str(MODEL)))
        path.write_text(before)
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(MODEL, tokenizer)
    spec = json.loads((tokenizer / "tokenizer.json").read_text())
    spec["model"]["vocab"][-1][1] -= 0.5
    (tokenizer / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match="has runs with tokenizer_fingerprint="):
        check_settings(output, fingerprint_inputs(task, str(data), str(tokenizer)))


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


def test_runs_without_checkpoints_or_validation_are_refused(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        plan_runs(tmp_path, tmp_path / "out", 1, 1)
    data = write_task(tmp_path / "data")
    path = data / "task.yaml"
    path.write_text(path.read_text().replace("dev: dev.tsv, ", ""))
    arguments = [str(pretrained), "--task", str(path), "--data", str(data)]
    assert main(["finetune-checkpoints", *arguments]) == EXIT_USAGE
    assert "has no split 'dev', whose score is the curve" in capsys.readouterr().err

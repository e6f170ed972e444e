"""Kept outputs of fine-tuned runs, used only for their weights and examples; ensembles."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_deberta.checkpoint.layout import checkpoints_dir, find_best
from megatron_deberta.cli.main import main
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.errors import EXIT_DONE, EXIT_USAGE, CheckpointError, ConfigError, DataError
from megatron_deberta.evaluate import outputs as module
from megatron_deberta.evaluate import predict as predict_module
from megatron_deberta.evaluate import splits as splits_module
from megatron_deberta.evaluate.outputs import (
    CONFIG_FILE,
    FOLDER,
    SEARCH_RESULTS,
    FinetunedRun,
    build_ensemble,
    find_runs,
    finished_validation,
    mean_outputs,
    read_outputs,
)
from megatron_deberta.evaluate.predict import open_predictor
from megatron_deberta.evaluate.validation import Evaluation
from megatron_deberta.tasks.scoring import cosines, softmax
from megatron_deberta.tasks.task import Head
from megatron_deberta.tokenizer import load_tokenizer
from tests.support.labelled import encoded
from tests.support.tiny_task import MODEL, write_task


def finetune(data: Path, run_dir: Path, *overrides: str) -> None:
    command = [
        "finetune", str(data / "task.yaml"), "--model", str(MODEL), "--data", str(data),
        f"train.run_dir={run_dir}", "parallel.engine=plain", "log.tensorboard=false",
        "train.global_batch_size=8", "train.device=cpu", "train.steps=2", "log.every=1",
        "optimizer.warmup_steps=0", *overrides,
    ]  # fmt: skip
    assert main(command) == EXIT_DONE


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task with its data, and the run ``run``."""
    folder = tmp_path_factory.mktemp("outputs")
    finetune(write_task(folder / "data"), folder / "run")
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> FinetunedRun:
    """A copy of the run without kept outputs."""
    shutil.copytree(trained / "run", tmp_path / "run", ignore=shutil.ignore_patterns(FOLDER))
    (found,) = find_runs(tmp_path / "run")
    return found


def files(run: FinetunedRun) -> list[Path]:
    return sorted((run.folder / FOLDER).glob("*.npy"))


def replace_kept(run: FinetunedRun, outputs: np.ndarray, **changes: str) -> None:
    """Replace the kept outputs of a run, with changes of their record."""
    (path,) = files(run)
    kept = json.loads(path.with_suffix(".json").read_text())
    module._keep(path, outputs, **{"weights": kept["weights"], "data": kept["data"], **changes})


def test_outputs_are_kept(run: FinetunedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = read_outputs(run, "dev")
    assert len(files(run)) == 1
    monkeypatch.setattr(module, "open_predictor", None)
    _, again = read_outputs(run, "dev")
    assert np.array_equal(first, again)
    assert again.shape == (11, 2)


def test_other_weights_of_the_same_step_have_their_own_outputs(
    run: FinetunedRun, trained: Path
) -> None:
    before = read_outputs(run, "dev")[1]
    shutil.rmtree(checkpoints_dir(run.folder))
    (run.folder / "metrics.jsonl").unlink()
    finetune(trained / "data", run.folder, "optimizer.learning_rate=5e-2")
    (again,) = find_runs(run.folder)
    assert again.checkpoint == run.checkpoint
    after = read_outputs(again, "dev")[1]
    assert np.abs(after - before).max() > 1e-3


def test_other_examples_of_the_same_split_have_their_own_outputs(
    run: FinetunedRun, trained: Path, tmp_path: Path
) -> None:
    before = read_outputs(run, "dev")[1]
    shutil.copytree(trained / "data", tmp_path / "data")
    lines = (tmp_path / "data" / "dev.tsv").read_text().splitlines()
    (tmp_path / "data" / "dev.tsv").write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
    after = read_outputs(run, "dev", str(tmp_path / "data"))[1]
    assert np.allclose(after, before[::-1], atol=1e-5)
    assert not np.array_equal(after, before)
    assert len(files(run)) == 2


def test_outputs_under_the_name_of_other_ones_are_not_used(run: FinetunedRun) -> None:
    """Of other examples, and of other weights, of the same shape."""
    expected = read_outputs(run, "dev")[1]
    for key in ("weights", "data"):
        replace_kept(run, expected + 1, **{key: "x"})
        assert np.array_equal(read_outputs(run, "dev")[1], expected)


# A pickle of [0.5, 0.5]
PICKLED = b"\x80\x04]\x94(G?\xe0\x00\x00\x00\x00\x00\x00G?\xe0\x00\x00\x00\x00\x00\x00e."


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 0x40
    path.write_bytes(content)


def _fifo(path: Path) -> None:
    """Replaced, not read."""
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        _fifo,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_text("0.5 0.5\n"),
        lambda path: path.write_bytes(PICKLED),
        lambda path: np.save(path, np.full((11, 2), np.nan, np.float32)),
        lambda path: np.save(path, np.zeros((3, 2), np.float32)),
        lambda path: path.with_suffix(".json").unlink(),
        lambda path: path.with_suffix(".json").write_text('{"weights": 3}'),
    ],
)
def test_damaged_outputs_are_computed_again(
    run: FinetunedRun, damage: Callable[[Path], object]
) -> None:
    first = read_outputs(run, "dev")[1]
    (path,) = files(run)
    damage(path)
    assert np.array_equal(read_outputs(run, "dev")[1], first)
    assert np.array_equal(np.load(path, allow_pickle=False), first)


@pytest.mark.parametrize("shape", [(3, 2), (11,), (11, 3)])
def test_a_record_does_not_make_another_shape_right(
    run: FinetunedRun, shape: tuple[int, ...]
) -> None:
    first = read_outputs(run, "dev")[1]
    replace_kept(run, np.zeros(shape, np.float32))
    assert np.array_equal(read_outputs(run, "dev")[1], first)


def test_outputs_that_are_no_numbers_are_refused(run: FinetunedRun) -> None:
    read_outputs(run, "dev")
    replace_kept(run, np.full((11, 2), np.nan, np.float32))
    with pytest.raises(DataError, match=r"outputs for the split dev are infinite or not a number"):
        read_outputs(run, "dev")


def test_an_ensemble_takes_the_best_runs(run: FinetunedRun) -> None:
    right = np.array([e.label for e in read_outputs(run, "dev")[0].examples])
    runs = []
    for number, wrong in enumerate((5, 1, 9)):
        folder = run.folder.parent / f"run{number}"
        shutil.copytree(run.folder, folder)
        (each,) = find_runs(folder)
        classes = np.where(np.arange(11) < wrong, 1 - right, right)
        replace_kept(each, np.eye(2, dtype=np.float32)[classes])
        runs.append(each)
    ensemble = build_ensemble(run.task, runs, 2)
    assert [member.folder.name for member in ensemble.members] == ["run1", "run0"]
    assert [score for score, _ in ensemble.scores] == pytest.approx([10 / 11, 6 / 11, 2 / 11])


def test_the_best_cell_of_a_search_is_inside_its_folder(run: FinetunedRun) -> None:
    search = run.folder.parent / "search"
    shutil.copytree(run.folder, search / "cells" / "a" / "seed_1")
    for best in ("../run", str(run.folder), "cells/../../run", 3, ""):
        (search / SEARCH_RESULTS).write_text(json.dumps({"best": best}))
        with pytest.raises(DataError, match="not the results of a search"):
            find_runs(search)
    (search / SEARCH_RESULTS).write_text(json.dumps({"best": "cells/a"}))
    assert [found.folder for found in find_runs(search)] == [search / "cells" / "a" / "seed_1"]
    (search / SEARCH_RESULTS).write_text(json.dumps({"best": None}))
    with pytest.raises(ConfigError, match="no cell of the search is complete"):
        find_runs(search)


def test_results_of_a_search_that_are_older_than_its_runs_are_refused(
    run: FinetunedRun, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a search that was killed before it could write the table."""
    search = run.folder.parent / "search"
    for name in ("a/seed_1", "a/seed_2", "b/seed_1", "b/seed_2"):
        shutil.copytree(run.folder, search / "cells" / name)
    (search / "cells" / "b" / "seed_2" / "best.json").unlink()
    shutil.rmtree(checkpoints_dir(search / "cells" / "b" / "seed_2"))
    cells = [
        {"folder": "cells/a", "runs": 2, "scores": {"1": 0.5, "2": 0.6}},
        {"folder": "cells/b", "runs": 2, "scores": {}},
    ]
    results = {"metric": "accuracy", "best": "cells/a", "cells": cells}
    (search / SEARCH_RESULTS).write_text(json.dumps(results))
    with pytest.raises(ConfigError, match="cells/b/seed_1 has finished since it was written"):
        find_runs(search)
    cells[1]["scores"] = {"1": 0.4}
    (search / SEARCH_RESULTS).write_text(json.dumps(results))
    assert len(find_runs(search)) == 2
    assert "1 runs of the search have no score yet; cells/a is the best" in caplog.text


def test_unfinished_runs_are_named_and_runs_without_checkpoint_left_out(
    run: FinetunedRun, caplog: pytest.LogCaptureFixture
) -> None:
    """Of ``compare`` and ``ensemble``; a process was killed at different moments."""
    folder = run.folder.parent / "runs"
    for name in ("damaged", "no_best", "no_checkpoint", "no_validation", "part", "whole"):
        shutil.copytree(run.folder, folder / name)
    (folder / "no_best" / "best.json").unlink()
    shutil.rmtree(checkpoints_dir(folder / "no_checkpoint"))
    metrics = folder / "no_validation" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"validation"' not in line))
    config = folder / "part" / CONFIG_FILE
    config.write_text(re.sub(r"(\n  steps:) 2\n", r"\1 9\n", config.read_text()))
    (folder / "damaged" / "metrics.jsonl").write_text("x\n")
    found = {each.folder.name: each.checkpoint.name for each in find_runs(folder)}
    names = ["damaged", "no_best", "no_validation", "part", "whole"]
    assert found == dict.fromkeys(names, "step_00000002")
    damaged, *said = [record.getMessage() for record in caplog.records]
    assert damaged.startswith(f"{folder}/damaged/metrics.jsonl:1: not a metrics record")
    assert damaged.endswith("it is not known whether this run has finished")
    assert said == [
        f"{folder}/no_checkpoint: left out, as it has no checkpoint",
        *(
            f"{folder}/{name}: this run has not finished (step 2 of {steps}); results are those "
            "of step_00000002"
            for name, steps in (("no_validation", 2), ("part", 9))
        ),
    ]  # fmt: skip


def test_a_best_checkpoint_that_is_not_recorded_is_found(run: FinetunedRun) -> None:
    """A process was killed after the commit of the best checkpoint, before ``best.json``."""
    shutil.copytree(run.checkpoint, run.checkpoint.with_name("step_00000001"))
    recorded = {"step": 2, "score": 0.25, "examples": ""}
    (run.folder / "best.json").write_text(json.dumps(recorded))
    lines = [{"step": 1, "kind": "validation", "loss": 1, "accuracy": 1, "score": 1}]
    lines += [{"step": 2, "kind": "validation", "loss": 1, "accuracy": 0.25, "score": 0.25}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.folder / "metrics.jsonl").write_text(text)
    assert [found.checkpoint.name for found in find_runs(run.folder)] == ["step_00000001"]


def test_outputs_of_checkpoints_that_are_gone_are_removed(run: FinetunedRun) -> None:
    read_outputs(run, "dev")
    (path,) = files(run)
    kept = json.loads(path.with_suffix(".json").read_text())
    gone = path.with_name("dev-step_00000001-0123456789abcdef.npy")
    module._keep(gone, np.zeros(3, np.float32), "0" * 64, kept["data"])
    # Of an earlier release, without a record; and one that is being written.
    np.save(path.with_name("dev-step_00000002.npy"), np.zeros(3))
    (path.parent / "dev-step_00000002.npy.7.x.tmp").write_bytes(b"1")
    for old in path.parent.iterdir():
        os.utime(old, (0, 0))
    np.save(path.with_name("test-step_00000002-fedcba9876543210.npy"), np.zeros(3))
    left = {path.name, path.with_suffix(".json").name, "test-step_00000002-fedcba9876543210.npy"}
    read_outputs(run, "dev")
    assert {each.name for each in path.parent.iterdir()} == left


def test_a_run_has_finished_when_its_last_validation_is_recorded(run: FinetunedRun) -> None:
    metrics = run.folder / "metrics.jsonl"
    finished = finished_validation(run.folder, "accuracy")
    assert finished is not None
    assert (finished.step, finished.steps) == (2, 2)
    assert finished.score == finished.metrics["accuracy"]
    lines = metrics.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"validation"' not in line]
    metrics.write_text("".join(kept))
    assert finished_validation(run.folder, "accuracy") is None
    # Recorded, but the checkpoint of the last step is not committed.
    metrics.write_text("".join(lines))
    shutil.move(run.checkpoint, run.checkpoint.with_name("step_00000001"))
    assert finished_validation(run.folder, "accuracy") is None
    shutil.rmtree(checkpoints_dir(run.folder))
    assert finished_validation(run.folder, "accuracy") is None


def test_a_killed_process_may_not_have_recorded_the_best(run: FinetunedRun) -> None:
    best = find_best(run.folder)
    assert best == run.checkpoint
    (run.folder / "best.json").unlink()
    assert find_best(run.folder) is None
    assert finished_validation(run.folder, "accuracy") is not None
    assert find_best(run.folder) == best


def test_a_run_that_keeps_no_best_checkpoint_has_the_score_of_its_last(
    run: FinetunedRun,
) -> None:
    path = run.folder / CONFIG_FILE
    path.write_text(path.read_text().replace("keep_best: true", "keep_best: false"))
    metrics = run.folder / "metrics.jsonl"
    better = {"step": 1, "kind": "validation", "loss": 0.1, "accuracy": 1.0, "score": 1.0}
    metrics.write_text(json.dumps(better) + "\n" + metrics.read_text())
    finished = finished_validation(run.folder, "accuracy")
    assert finished is not None
    assert finished.step == 2
    assert finished.score == finished.metrics["accuracy"] < 1


def test_damaged_weights_predict_nothing(
    run: FinetunedRun, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit is found before the weights are used, by every command that reads them."""
    (weights,) = run.checkpoint.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x40
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match="SHA-256 differs from the manifest's"):
        read_outputs(run, "dev")
    data, model = str(trained / "data"), str(run.folder)
    for command in (
        ["predict", "--model", model, "--text", "the cat"],
        ["evaluate", "task", f"{data}/task.yaml", "--model", model, "--data", data],
    ):
        assert main(command) == EXIT_USAGE
        assert "SHA-256 differs from the manifest's" in capsys.readouterr().err


def test_another_tokenizer_at_the_same_place_is_refused(run: FinetunedRun, tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocab = spec["model"]["vocab"]
    vocab[-1], vocab[-2] = vocab[-2], vocab[-1]
    path.write_text(json.dumps(spec))
    with (
        pytest.raises(DataError, match="has fingerprint .* but the run was trained with"),
        open_predictor("", run.checkpoint, "", tokenizer=str(tmp_path / "other")),
    ):
        pass


def test_outputs_that_cannot_be_written_are_refused_before_the_work(
    run: FinetunedRun, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(predict_module, "open_predictor", None)
    monkeypatch.setattr(module, "open_predictor", None)
    (tmp_path / "file").touch()
    data, model = str(trained / "data"), str(run.folder)
    task = [f"{data}/task.yaml", "--model", model, "--data", data]
    for command in (
        ["predict", *task, "--output"],
        ["predict", *task, "--leaderboard"],
        ["evaluate", "task", *task, "--output"],
        ["compare", model, model, "--output"],
        ["ensemble", model, "--best", "1", "--output"],
        ["report", model, "--output"],
    ):
        assert main([*command, str(tmp_path / "file" / "x")]) == EXIT_USAGE
        assert f"{command[-1]} {tmp_path / 'file' / 'x'}: " in capsys.readouterr().err
    assert main(["predict", *task, "--output", str(tmp_path)]) == EXIT_USAGE
    assert f"--output {tmp_path} is a folder" in capsys.readouterr().err
    assert main(["predict", *task, "--output", "/dev/null"]) == EXIT_USAGE
    assert "--output /dev/null is not a regular file" in capsys.readouterr().err


def test_a_threshold_is_for_tasks_with_unanswerable_questions(
    run: FinetunedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", "--model", str(run.folder), "--text", "the cat", "--null-threshold"]
    assert main([*command, "0"]) == EXIT_USAGE
    assert "--null-threshold 0 is for tasks with unanswerable" in capsys.readouterr().err


def test_a_validation_without_numbers_is_no_score(
    run: FinetunedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on, and no such step is the best one."""
    split = read_outputs(run, "dev")[0]
    outputs = np.zeros((11, 2), np.float32)
    outputs[3] = np.nan
    evaluation = Evaluation({"loss": float("nan")}, "")
    monkeypatch.setattr(splits_module, "run_split", lambda *a: (outputs, evaluation))
    found = splits_module.validate_split(
        torch.nn.Identity(),
        config=run.config,
        task=run.task,
        split=split,
        tokenizer=load_tokenizer(str(MODEL)),
        groups=single_process_groups(torch.device("cpu")),
    )
    assert found is not None
    assert np.isnan([found.metrics["accuracy"], found.metrics["score"]]).all()
    assert "not a number in 1 of 11 rows" in caplog.text


def test_predictions_leave_nothing_in_the_current_folder(
    run: FinetunedRun, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config of a run has the folder in which it was trained, which may be relative."""
    path = run.folder / CONFIG_FILE
    path.write_text(re.sub("run_dir: .*", "run_dir: relative", path.read_text()))
    (found,) = find_runs(run.folder)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    data = str(trained / "data")
    command = ["evaluate", "task", f"{data}/task.yaml", "--data", data, "--model"]
    assert main(["convert", "--checkpoint", str(run.folder), "--output", str(tmp_path / "x")]) == 0
    assert main([*command, str(tmp_path / "x")]) == EXIT_DONE
    assert main([*command, str(run.folder)]) == EXIT_DONE
    read_outputs(found, "dev")
    assert list((tmp_path / "here").iterdir()) == []


def test_predictions_are_utf8_whatever_the_locale_is(
    run: FinetunedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    assert main(["predict", "--model", str(run.folder), "--text", "\u6771\u4eac the cat"]) == 0
    assert json.loads(raw.getvalue())["text"] == "\u6771\u4eac the cat"


def test_classes_have_the_mean_probabilities() -> None:
    data = encoded("classification", 2)
    first = np.log(np.array([[0.9, 0.1], [0.5, 0.5]], np.float32)) + 3
    second = np.log(np.array([[0.3, 0.7], [0.2, 0.8]], np.float32)) - 1
    found = mean_outputs("classification", data, [first, second])
    assert softmax(found) == pytest.approx(np.array([[0.6, 0.4], [0.35, 0.65]]))
    certain = np.array([[0, 200], [0, 0]], np.float32)
    assert np.isfinite(mean_outputs("classification", data, [certain, certain])).all()


@pytest.mark.parametrize("head", ["regression", "rerank"])
def test_scores_are_averaged(head: Head) -> None:
    data = encoded(head, 3, choices=(1,))
    outputs = [np.array(v, np.float32) for v in ([1, 2, 3], [3, 2, -1])]
    assert mean_outputs(head, data, outputs).tolist() == [2, 2, 1]


def test_choices_are_normalised_per_example() -> None:
    data = encoded("choices", 2, choices=(2, 3))
    first = np.log(np.array([0.8, 0.2, 0.1, 0.1, 0.8], np.float32))
    second = np.log(np.array([0.4, 0.6, 0.5, 0.5, 0.0001], np.float32)) + 5
    found = np.exp(mean_outputs("choices", data, [first, second]))
    assert found[:2] == pytest.approx([0.6, 0.4])
    assert found[2:] == pytest.approx([0.3, 0.3, 0.4], abs=1e-3)


def test_spans_are_normalised_over_all_windows_of_an_example() -> None:
    data = encoded("spans", 3)
    random = np.random.default_rng(0)
    outputs = random.normal(size=(len(data.input_ids), 2)).astype(np.float32)
    found = mean_outputs("spans", data, [outputs])
    for example in range(data.num_examples):
        rows = data.example_offsets[example : example + 2]
        tokens = slice(*data.row_offsets[rows])
        assert np.exp(found[tokens]).sum(axis=0) == pytest.approx([1, 1], rel=1e-5)
        # A constant per example and side: the best span and the score of no answer stay.
        constant = found[tokens] - outputs[tokens]
        assert np.ptp(constant, axis=0) == pytest.approx([0, 0], abs=1e-5)


def test_tokens_are_normalised_one_by_one() -> None:
    data = encoded("tokens", 2)
    logits = np.random.default_rng(0).normal(size=(len(data.input_ids), 3)).astype(np.float32)
    found = mean_outputs("tokens", data, [logits, logits])
    assert np.exp(found) == pytest.approx(softmax(logits), rel=1e-5)


def test_embeddings_of_an_ensemble_have_the_mean_of_the_cosines() -> None:
    data = encoded("embed", 2)
    random = np.random.default_rng(0)
    members = [random.normal(size=(6, size)).astype(np.float32) for size in (3, 5)]
    mean = cosines(data, mean_outputs("embed", data, members))
    expected = np.mean([cosines(data, each) for each in members], axis=0)
    assert mean == pytest.approx(expected, abs=1e-6)

"""``finetune``, ``evaluate`` and ``predict`` of a tiny model: resumed runs, best checkpoints."""

from __future__ import annotations

import io
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_deberta.checkpoint.layout import (
    BEST_FILE,
    KINDS,
    committed_steps,
    find_best,
    step_dir,
)
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.cli.main import main
from megatron_deberta.config.schema import with_task_head
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USAGE
from megatron_deberta.evaluate import splits
from megatron_deberta.evaluate.models import open_source_model
from megatron_deberta.evaluate.outputs import finished_validation
from megatron_deberta.finetune import data as task_data
from megatron_deberta.hf.config import SpecialIds, choose_model_type
from megatron_deberta.hf.export_model import write_hf_model
from megatron_deberta.observe.metrics import read_metrics
from megatron_deberta.train.step import TrainStep
from tests.support.jobs import ForkedRank, free_port, rank_variables
from tests.support.tiny_models import random_weights
from tests.support.tiny_runs import export_run
from tests.support.tiny_task import MODEL, write_task

pytest.importorskip("sklearn")
Finetune = Callable[..., int]
TIMEOUT = 240.0
"""Maximum seconds of a run in another process."""


class Killed(BaseException):
    """Ends a run between two steps: nothing may catch it."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A task file and its data."""
    return write_task(tmp_path / "data")


@pytest.fixture
def finetune(data: Path) -> Finetune:
    """Run ``finetune`` in this process."""

    def run(run_dir: Path, *overrides: str, model: Path = MODEL) -> int:
        return main(arguments(data, run_dir, *overrides, model=model))

    return run


def arguments(data: Path, run_dir: Path, *overrides: str, model: Path = MODEL) -> list[str]:
    return [
        "finetune", str(data / "task.yaml"), "--model", str(model), "--data", str(data),
        f"train.run_dir={run_dir}", "parallel.engine=plain", "log.tensorboard=false",
        "train.global_batch_size=8", "train.device=cpu", "log.every=1",
        "optimizer.learning_rate=3e-3", *overrides,
    ]  # fmt: skip


def kill_at_step(last: int, command: list[str]) -> None:
    """Run a command that sends SIGKILL to its own process instead of step ``last``."""
    torch.set_num_threads(1)
    call = TrainStep.__call__

    def step_or_kill(self: Any, step: int, *args: Any) -> Any:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(self, step, *args)

    TrainStep.__call__ = step_or_kill  # type: ignore[method-assign]
    main(command)


def state(path: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(path)
    return {f"{kind}/{n}": reader.tensor(n, kind) for kind in KINDS for n in reader.shapes}


def losses(run_dir: Path) -> list[Any]:
    records = read_metrics(run_dir / "metrics.jsonl")
    kept = ("step", "kind", "loss", "sift_loss", "accuracy", "score")
    return [
        [record.get(key) for key in kept]
        for record in records
        if record["kind"] in ("train", "validation")
    ]


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, data: Path, finetune: Finetune) -> None:
    options = ("finetune.epochs=2", "objective.sift_weight=5", "checkpoint.save_every=3")
    assert finetune(tmp_path / "whole", *options) == EXIT_DONE
    command = arguments(data, tmp_path / "killed", *options)
    process = multiprocessing.get_context("fork").Process(target=kill_at_step, args=(8, command))
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode == -signal.SIGKILL
    assert finetune(tmp_path / "killed", *options) == EXIT_DONE
    assert committed_steps(tmp_path / "killed") == committed_steps(tmp_path / "whole")
    whole, resumed = (state(step_dir(tmp_path / name, 10)) for name in ("whole", "killed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    # 37 examples in batches of 8 are five steps per epoch, each followed by a validation.
    assert [row[0] for row in losses(tmp_path / "whole") if row[1] == "validation"] == [5, 10]


def test_adapters_are_trained_resumed_and_merged(
    tmp_path: Path, data: Path, finetune: Finetune, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("train.steps=10", "finetune.lora_rank=2", "finetune.lora_targets=[query,up,down]")
    assert finetune(tmp_path / "whole", *options) == EXIT_DONE
    printed = capsys.readouterr()
    assert re.search(r"finetune.lora_rank=2: [\d,]+ of [\d,]+ parameters are trained", printed.err)
    assert finetune(tmp_path / "parts", *options, "train.exit_step=4") == EXIT_DONE
    assert finetune(tmp_path / "parts", *options) == EXIT_DONE
    whole, resumed = (state(step_dir(tmp_path / name, 10)) for name in ("whole", "parts"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    # The encoder keeps the weights of the model.
    base = open_source_model(MODEL)
    kept = [
        name.removeprefix("weight/")
        for name in whole
        if name.startswith(("weight/encoder.", "weight/embeddings.")) and ".lora." not in name
    ]
    assert all(whole[f"weight/{name}"].equal(base.read(name)) for name in kept)
    for changed in ("finetune.lora_rank=3", "finetune.lora_alpha=8", "finetune.lora_rank=null"):
        assert finetune(tmp_path / "whole", *options, changed) == EXIT_USAGE
        assert f"{changed.partition('=')[0]}=" in capsys.readouterr().err

    task = [str(data / "task.yaml"), "--data", str(data), "--split", "dev"]
    run, export, found = tmp_path / "whole", tmp_path / "export", []
    export_run(run, export)
    assert (
        "low-rank adapters (rank 2, alpha 16) of query, up, down"
        in (export / "README.md").read_text()
    )
    for model in (run, export):
        output = tmp_path / f"{model.name}.jsonl"
        command = ["predict", *task, "--model", str(model), "--output", str(output)]
        assert main(command) == EXIT_DONE
        found.append(output.read_text())
    assert found[0] == found[1]
    export_run(run, tmp_path / "peft", "--to", "peft")
    assert {path.name for path in (tmp_path / "peft").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    # A model with merged adapters is one to fine-tune.
    assert (
        finetune(tmp_path / "next", "train.steps=1", "optimizer.warmup_steps=0", model=run)
        == EXIT_DONE
    )
    command = ["convert", "--checkpoint", str(tmp_path / "next"), "--to", "peft"]
    capsys.readouterr()
    assert main([*command, "--output", str(tmp_path / "none")]) == EXIT_USAGE
    assert "finetune.lora_rank=null" in capsys.readouterr().err


def test_the_best_checkpoint_is_kept_and_used(
    tmp_path: Path,
    finetune: Finetune,
    data: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = tmp_path / "run"
    options = ("train.steps=30", "train.eval_every=3", "finetune.patience=2")
    assert finetune(run_dir, *options, "optimizer.warmup_steps=0") == EXIT_DONE
    scored = [
        (r["score"], r["step"])
        for r in read_metrics(run_dir / "metrics.jsonl")
        if r["kind"] == "validation"
    ]
    best_score = max(score for score, _ in scored)
    best_step = min(step for score, step in scored if score == best_score)
    assert find_best(run_dir) == step_dir(run_dir, best_step)
    # Ended two validations after the best one.
    assert scored[-1][1] == best_step + 6 < 30
    assert committed_steps(run_dir) == [best_step, best_step + 6]

    task = [str(data / "task.yaml"), "--model", str(run_dir), "--data", str(data)]
    report, output = tmp_path / "metrics.json", tmp_path / "predictions.jsonl"
    assert main(["evaluate", "task", *task, "--output", str(report)]) == EXIT_DONE
    found = json.loads(report.read_text())
    assert found["accuracy"] == pytest.approx(best_score)
    classes = found["class_scores"]
    assert [each["name"] for each in classes["classes"]] == ["bad", "good"]
    total = sum(map(sum, classes["confusion"]))
    assert sum(each["right"] for each in classes["classes"]) / total == found["accuracy"]
    assert "confusion matrix" in capsys.readouterr().out
    lines = (run_dir / "class_scores.jsonl").read_text().splitlines()
    recorded = {line["step"]: line for line in map(json.loads, lines)}
    assert list(recorded) == [step for _, step in scored]
    assert {"step": best_step, **classes} == recorded[best_step]
    board = tmp_path / "board"
    options = ["--output", str(output), "--leaderboard", str(board)]
    capsys.readouterr()
    assert main(["predict", *task, *options]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert f"{output}: 5 predictions of tiny" in printed
    (submission,) = board.iterdir()
    assert len(submission.read_text().splitlines()) == 5
    # Without a leaderboard of its own the task has the same file there.
    assert submission.read_bytes() == output.read_bytes()
    predictions = [json.loads(line) for line in output.read_text().splitlines()]
    assert {p["label"] for p in predictions} <= {"good", "bad"}
    assert len(predictions) == 5
    rows = [line.split("\t") for line in (data / "test.tsv").read_text().splitlines()[1:]]
    assert [[p["text"], p["gold"]] for p in predictions] == rows
    for prediction in predictions:
        assert list(prediction["scores"]) == ["bad", "good"]
        assert sum(prediction["scores"].values()) == pytest.approx(1)
        assert prediction["label"] == max(prediction["scores"], key=prediction["scores"].get)
    check_texts(run_dir, predictions, tmp_path, capsys, monkeypatch)

    # The fine-tuned model starts another run; its head is taken over.
    caplog.clear()
    assert (
        finetune(tmp_path / "next", "train.steps=1", "optimizer.warmup_steps=0", model=run_dir) == 0
    )
    assert "the head is taken over unchanged" in caplog.text


def published_classifier(folder: Path, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Write a classifier as transformers would save it, with these fields about its classes."""
    model = open_source_model(MODEL).config
    config = with_task_head(model, "classification", ("bad", "good"))
    weights = random_weights(config)
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.json", "*.py"))
    for path in MODEL.glob("tokenizer*"):
        shutil.copy(path, folder)
    write_hf_model(folder, config, choose_model_type(config)[0], weights.__getitem__, SpecialIds())
    path = folder / "config.json"
    written = json.loads(path.read_text())
    for key in ("id2label", "label2id", "problem_type"):
        del written[key]
    path.write_text(json.dumps(written | fields))
    return weights


def predictions(data: Path, model: Path, output: Path) -> list[Any]:
    command = ["predict", str(data / "task.yaml"), "--model", str(model), "--data", str(data)]
    assert main([*command, "--output", str(output)]) == EXIT_DONE
    return [json.loads(line) for line in output.read_text().splitlines()]


def scores(prediction: dict[str, Any]) -> list[float]:
    """Return the scores of a line of predictions, in the order of the task's classes."""
    return list(prediction["scores"].values())


def test_classes_of_a_published_model_are_matched_by_name(
    tmp_path: Path, data: Path, finetune: Finetune, caplog: pytest.LogCaptureFixture
) -> None:
    """The task has the classes bad and good."""
    same, other, unnamed, many, foreign = (
        tmp_path / name for name in ("same", "other", "unnamed", "many", "foreign")
    )
    weights = published_classifier(same, {"id2label": {"0": "bad", "1": "good"}})
    expected = predictions(data, same, tmp_path / "a")
    published_classifier(other, {"id2label": {"0": "GOOD", "1": "BAD"}})
    found = predictions(data, other, tmp_path / "b")
    swapped = {"bad": "good", "good": "bad"}
    assert [p["label"] for p in found] == [swapped[p["label"]] for p in expected]
    for one, two in zip(found, expected, strict=True):
        assert scores(one) == pytest.approx(scores(two)[::-1])

    # Two default names are not written by transformers.
    published_classifier(unnamed, {})
    assert predictions(data, unnamed, tmp_path / "c") == expected
    assert "does not name its classes; taken to be, in this order: bad, good" in caplog.text

    published_classifier(many, {"problem_type": "multi_label_classification"})
    for one, two in zip(predictions(data, many, tmp_path / "d"), expected, strict=True):
        assert one["label"] == two["label"]
        odds = [math.log(p / (1 - p)) for p in scores(one)]
        # The difference of the logits is the log-odds of the softmax.
        first, second = scores(two)
        assert odds[0] - odds[1] == pytest.approx(math.log(first / second), abs=1e-4)
        assert sum(scores(one)) != pytest.approx(1, abs=1e-3)

    published_classifier(foreign, {"id2label": {"0": "spam", "1": "ham"}})
    command = ["predict", str(data / "task.yaml"), "--model", str(foreign), "--data", str(data)]
    assert main(command) == EXIT_USAGE

    # Fine-tuning starts from the same rows, or from new ones, and says which.
    for model, said, rows in (
        (same, "the head is taken over unchanged", [0, 1]),
        (other, "permuted to the order of the task's classes: bad, good", [1, 0]),
        (foreign, "classifier.weight, classifier.bias", None),
    ):
        caplog.clear()
        run_dir = tmp_path / f"run-{model.name}"
        assert finetune(run_dir, "train.steps=1", "optimizer.learning_rate=1e-12",
                        "optimizer.warmup_steps=0", model=model) == EXIT_DONE  # fmt: skip
        assert said in caplog.text
        started = CheckpointReader(step_dir(run_dir, 1)).tensor("classifier.weight")
        wanted = weights["classifier.weight"][rows or [0, 1]]
        assert torch.allclose(started, wanted, atol=1e-6) == (rows is not None)
    assert "has the classes spam, ham, not bad, good" in caplog.text


def check_texts(
    run_dir: Path,
    expected: list[dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Predict the texts of ``expected`` without a task: of the run, and of its export."""
    exported = export_run(run_dir, tmp_path / "exported")
    texts = [prediction["text"] for prediction in expected]
    given = [argument for text in texts for argument in ("--text", text)]
    for model in (run_dir, exported):
        command = ["predict", "--model", str(model), "train.device=cpu"]
        for arguments, lines in (
            (given, ""),
            ([], "\ufeff" + "\r\n".join([*texts, ""])),
            (["--text", "-"], "\n\n".join(texts)),
        ):
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
            capsys.readouterr()
            assert main([*command, *arguments]) == EXIT_DONE
            found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            assert [p["text"] for p in found] == texts
            assert [p["label"] for p in found] == [p["label"] for p in expected]
            assert not any("gold" in p for p in found)
            for ours, theirs in zip(found, expected, strict=True):
                assert ours["scores"] == pytest.approx(theirs["scores"], abs=1e-5)
        for arguments, message in (
            (["--text", " "], "is empty"),
            (["--text", "a", "--data", str(tmp_path)], "give one of them"),
            (["--data", str(tmp_path)], "needs TASK"),
            (["sst2"], "give the folder of its files with --data, or --text TEXT"),
            (["sst2", "--text", "a"], "labels ['negative', 'positive'], the model"),
            (["--text", "a", "--split", "dev"], "--split dev needs TASK and --data"),
            (["--text", "a", "--text", "b", "--text-pair", "c"], "1 --text-pair for 2 texts"),
            ([], "standard input has no text"),
        ):
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
            assert main([*command, *arguments]) == EXIT_USAGE
            assert message in capsys.readouterr().err
    text = "Tiếng Việt 東京"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "latin-1"))
    stdout = io.TextIOWrapper(io.BytesIO(), "latin-1")
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stdout)
        assert main(["predict", "--model", str(exported), "train.device=cpu"]) == EXIT_DONE
    assert json.loads(stdout.buffer.getvalue())["text"] == text  # type: ignore[attr-defined]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xe9")))
    assert main(["predict", "--model", str(exported), "train.device=cpu"]) == EXIT_USAGE
    assert "standard input is not UTF-8" in capsys.readouterr().err


def test_two_ranks_predict_as_one(
    tmp_path: Path, finetune: Finetune, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, alone, together = (tmp_path / name for name in ("run", "alone", "together"))
    assert finetune(run_dir, "train.steps=1", "optimizer.warmup_steps=0") == EXIT_DONE
    command = ["predict", str(data / "task.yaml"), "--model", str(run_dir), "--data", str(data)]
    assert main([*command, "--output", str(alone)]) == EXIT_DONE
    port = free_port()
    ranks = [
        ForkedRank(
            os.environ | rank_variables(rank, 2, port),
            [*command, "--output", str(together)],
            tmp_path / f"{rank}.log",
        )
        for rank in (0, 1)
    ]
    assert [rank.wait(TIMEOUT) for rank in ranks] == [EXIT_DONE, EXIT_DONE]
    (tested,) = data.glob("test.*")
    tested.rename(tmp_path / "elsewhere")
    assert main(command) == EXIT_USAGE
    assert "no such file" in (error := capsys.readouterr().err)
    assert "choose a split with --split: train, dev" in " ".join(error.split())
    tested.write_text("")
    assert main(command) == EXIT_USAGE
    assert "test.tsv:1: the file is empty" in " ".join(capsys.readouterr().err.split())
    # Rank 1 writes nothing, not even to standard output.
    assert "scores" not in (tmp_path / "1.log").read_text()
    expected, found = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (alone, together)
    )
    assert len(expected) == 5
    for one, other in zip(expected, found, strict=True):
        assert (one["id"], one["label"]) == (other["id"], other["label"])
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-6)


def test_a_saved_run_is_checked_and_trained_by_other_commands(
    tmp_path: Path,
    data: Path,
    finetune: Finetune,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved, run_dir = tmp_path / "run.yaml", tmp_path / "run"
    steps = ("train.steps=2", "optimizer.warmup_steps=1")
    assert finetune(run_dir, *steps, "--save-config", str(saved)) == EXIT_DONE
    assert not run_dir.exists()
    main(["doctor", str(saved)])
    assert "task tiny, 37 train examples, 11 dev examples" in capsys.readouterr().out
    assert main(["pretrain", str(saved)]) == EXIT_DONE
    assert committed_steps(run_dir) == [2]
    submit = ["submit", str(saved), "--cluster", "local", "--nodes", "1", "--dry-run"]
    assert main(submit) == EXIT_DONE
    # From another folder, and without the task's file.
    (data / "task.yaml").unlink()
    monkeypatch.chdir(data.parent)
    export_run(run_dir, Path("export"))
    assert main(["compare", str(run_dir), str(run_dir), "--split", "dev"]) == EXIT_DONE
    assert "tiny" in capsys.readouterr().out


def test_a_model_without_the_head_cannot_predict(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = [str(data / "task.yaml"), "--model", str(MODEL), "--data", str(data)]
    assert main(["predict", *task]) == EXIT_USAGE
    assert "is not fine-tuned" in capsys.readouterr().err


def test_checkpoints_of_a_run_give_a_curve(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "pretrained"
    shutil.copytree(MODEL.parent / "run", run_dir)
    *_, last = steps = committed_steps(run_dir)
    output = tmp_path / "curve"
    command = [
        "finetune-checkpoints", str(run_dir), "--task", str(data / "task.yaml"),
        "--data", str(data), "--output", str(output), "--seeds", "2", "--every", str(len(steps)),
        "--tokenizer", str(MODEL.parent / "tokenizer"),
    ]  # fmt: skip
    settings = (
        "parallel.engine=plain", "log.tensorboard=false", "train.global_batch_size=8",
        "train.device=cpu", "train.steps=2", "optimizer.warmup_steps=0",
    )  # fmt: skip
    call, calls = TrainStep.__call__, []

    def killed(self: Any, step: int, *args: Any) -> Any:
        calls.append(step)
        if len(calls) == 4:
            raise Killed
        return call(self, step, *args)

    monkeypatch.setattr(TrainStep, "__call__", killed)
    with pytest.raises(Killed):
        main([*command, *settings])
    # The first seed has finished and is shown; it is not repeated.
    curve = json.loads((output / "curve.json").read_text())
    assert [len(point["scores"]) for point in curve["points"]] == [1]
    calls.clear()
    assert main([*command, *settings]) == EXIT_DONE
    assert calls == [0, 1]
    (point,) = json.loads((output / "curve.json").read_text())["points"]
    assert (point["step"], len(point["scores"])) == (last, 2)
    assert point["mean"] == pytest.approx(sum(point["scores"]) / 2)
    assert (output / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[-2].split()[0] == f"{last:,}"

    capsys.readouterr()
    assert main([*command, *settings[:-1], "optimizer.warmup_steps=1"]) == EXIT_USAGE
    assert "use another --output" in capsys.readouterr().err
    assert main([*command, "train.seed=3"]) == EXIT_USAGE
    assert "use --seeds" in capsys.readouterr().err


Scores = Callable[[list[float]], None]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scores:
    """Return a function that sets the scores of the next validations."""
    # It has a score as well.
    monkeypatch.setattr(task_data, "constant_outputs", lambda *_: None)

    def script(scores: list[float]) -> None:
        left = iter(scores)
        monkeypatch.setattr(splits, "score", lambda *_: {"accuracy": next(left)})

    return script


def best_of(run_dir: Path) -> dict[str, Any]:
    best = json.loads((run_dir / BEST_FILE).read_text())
    return {key: best[key] for key in ("step", "score")}


STEPS = ("train.steps=8", "train.eval_every=3", "optimizer.warmup_steps=0")


def test_a_run_stopped_during_its_last_validation_has_not_finished(
    tmp_path: Path, finetune: Finetune, scripted: Scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted([0.5, 0.6])
    run_split, calls = splits.run_split, itertools.count(1)

    def stop_at_third(*args: Any) -> Any:
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            return None
        return run_split(*args)

    monkeypatch.setattr(splits, "run_split", stop_at_third)
    # A save of step 6 that is still running would be waited for in place of saving step 8.
    assert finetune(tmp_path, *STEPS, "checkpoint.asynchronous=false") == EXIT_REQUEUE
    assert committed_steps(tmp_path)[-1] == 8
    assert finished_validation(tmp_path, "accuracy") is None
    scripted([0.9])
    assert finetune(tmp_path, *STEPS) == EXIT_DONE
    finished = finished_validation(tmp_path, "accuracy")
    assert finished is not None
    assert (finished.step, finished.score, finished.steps) == (8, 0.9, 8)
    assert best_of(tmp_path) == {"step": 8, "score": 0.9}

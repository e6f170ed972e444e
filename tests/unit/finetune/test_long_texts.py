"""Fine-tuning on documents that are longer than a row: in windows, and cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_deberta.cli.main import main
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.errors import EXIT_DONE
from megatron_deberta.evaluate.models import open_source_model
from megatron_deberta.evaluate.outputs import find_runs, read_outputs
from megatron_deberta.finetune.data import constant_outputs, open_task_data
from megatron_deberta.finetune.settings import finetune_config
from megatron_deberta.observe.metrics import read_metrics
from megatron_deberta.tasks import encode, load_task, read_examples
from megatron_deberta.tasks.scoring import predict, score
from megatron_deberta.tokenizer import load_tokenizer
from tests.support.tiny_task import MODEL, WORDS

LENGTH = 24
METRICS = {
    "classification": "accuracy",
    "multilabel": "micro_f1",
    "regression": "pearson",
}
ENDS = ("dog " * 8, "rain " * 6)
"""Of about a row; a document has as many tokens before."""
LABELS: dict[str, tuple[Any, Any]] = {
    "classification": ("bad", "good"),
    "multilabel": (["bad"], ["bad", "good"]),
    "regression": (0.0, 1.0),
}


def write_documents(folder: Path, head: str, long_text: str) -> Path:
    """Write a task whose documents are equal in pairs but for their last words and their label."""
    folder.mkdir()
    for name, pairs, shift in (("train", 16, 0), ("dev", 6, 5)):
        lines = []
        for number in range(pairs):
            size = 11 + number % 3
            words = [WORDS[(3 * number + shift + at) % len(WORDS)] for at in range(size)]
            for end, label in zip(ENDS, LABELS[head], strict=True):
                text = " ".join([*words, end])
                lines.append(json.dumps({"text": text, "label": label}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    names = "[]" if head == "regression" else "[bad, good]"
    (folder / "task.yaml").write_text(
        f"name: documents\nhead: {head}\nreader: jsonl\nsplits: {{train: train.jsonl, "
        f"dev: dev.jsonl}}\ncolumns: {{text: text, label: label}}\nlabels: {names}\n"
        f"metrics: [{METRICS[head]}]\nmax_length: {LENGTH}\nstride: 4\nlong_text: {long_text}\n"
    )
    return folder


def finetune(data: Path, run_dir: Path, *overrides: str) -> float:
    """Fine-tune a tiny model, and return the score of its last validation."""
    command = [
        "finetune", str(data / "task.yaml"), "--model", str(MODEL), "--data", str(data),
        f"train.run_dir={run_dir}", "parallel.engine=plain", "log.tensorboard=false",
        "train.global_batch_size=16", "train.device=cpu", "log.every=100",
        "optimizer.learning_rate=1e-2", "train.eval_every=1000", *overrides,
    ]  # fmt: skip
    assert main(command) == EXIT_DONE
    records = read_metrics(run_dir / "metrics.jsonl")
    (found,) = [record["score"] for record in records if record["kind"] == "validation"]
    return float(found)


@pytest.mark.parametrize(
    ("head", "long_text", "overrides"),
    [
        ("classification", "mean", ("finetune.pack_rows=true",)),
        pytest.param("multilabel", "max", (), marks=pytest.mark.nightly),
        pytest.param(
            "regression", "mean", ("finetune.batch_by_length=false",), marks=pytest.mark.nightly
        ),
    ],
)
def test_the_end_of_a_document_is_learned_in_windows(
    head: str, long_text: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    data, run_dir = write_documents(tmp_path / "data", head, long_text), tmp_path / "run"
    found = finetune(data, run_dir, "train.steps=60", *overrides)
    assert found > 0.95
    (run,) = find_runs(run_dir)
    split, outputs = read_outputs(run, "dev")
    assert len(outputs) == split.encoded.num_rows > 2 * len(split.examples)
    expected = predict(run.task, split.examples, split.encoded, outputs)
    values = score(run.task, split.examples, split.encoded, outputs)
    assert values[METRICS[head]] == pytest.approx(found, abs=1e-5)
    report = tmp_path / "report.json"
    evaluate = ["evaluate", "task", str(data / "task.yaml"), "--model", str(run_dir)]
    assert main([*evaluate, "--data", str(data), "--output", str(report)]) == EXIT_DONE
    assert json.loads(report.read_text())[METRICS[head]] == pytest.approx(found, abs=1e-5)
    # The default of predict is the task's, of files as of a split.
    texts = [json.loads(line) for line in (data / "dev.jsonl").read_text().splitlines()]
    options = (
        [str(data / "task.yaml"), "--data", str(data), "--split", "dev"],
        ["--input", str(data / "dev.jsonl")],
    )
    for option in options:
        predictions = tmp_path / "predictions.jsonl"
        command = ["predict", "--model", str(run_dir), "--output", str(predictions), *option]
        assert main(command) == EXIT_DONE
        lines = [json.loads(line) for line in predictions.read_text().splitlines()]
        for line, each, text in zip(lines, expected, texts, strict=True):
            assert (line["windows"], "truncated" in line) == (each.windows, False)
            if head == "regression":
                assert line["label"] == pytest.approx(each.value, abs=1e-5)
                continue
            assert line["label"] == text["label"]
            scores = [*line["scores"].values()]
            assert scores == pytest.approx(list(each.probabilities), abs=1e-5)


def test_the_end_of_a_document_that_is_cut_is_not_learned(tmp_path: Path) -> None:
    """Cut documents of a pair are equal, so the accuracy is 0.5."""
    data = write_documents(tmp_path / "data", "classification", "truncate")
    task = load_task(str(data / "task.yaml"))
    cut = encode(task, read_examples(task, data, "dev"), load_tokenizer(str(MODEL)))
    assert cut.num_rows == 12
    assert cut.input_ids.reshape(6, 2, LENGTH)[:, 0].tolist() == (
        cut.input_ids.reshape(6, 2, LENGTH)[:, 1].tolist()
    )
    assert finetune(data, tmp_path / "run", "train.steps=10") == 0.5


def test_weights_and_baselines_count_documents(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", "classification", "mean")
    lines = (data / "train.jsonl").read_text().splitlines()
    short = [json.dumps({"text": "the cat", "label": "bad"})] * 8
    (data / "train.jsonl").write_text("\n".join([*lines, *short]) + "\n")
    overrides = ["finetune.class_weights=balanced", "finetune.epochs=2", "train.device=cpu"]
    overrides += ["train.global_batch_size=8", f"train.run_dir={tmp_path / 'run'}"]
    config = finetune_config(
        str(data / "task.yaml"), open_source_model(MODEL), str(data), overrides
    )
    config, found = open_task_data(config, single_process_groups(torch.device("cpu")))
    rows = found.train.encoded.num_rows
    assert rows > 2 * 32 + 8
    assert config.train.steps == 2 * -(-rows // 8)
    # 24 documents are bad, and 16 are good.
    assert [float(each) for each in config.finetune.class_weights] == [40 / 48, 40 / 32]
    assert found.dev is not None
    outputs = constant_outputs(found.task, found.train, found.dev)
    assert outputs is not None
    assert len(outputs) == found.dev.encoded.num_rows
    assert score(found.task, found.dev.examples, found.dev.encoded, outputs) == {"accuracy": 0.5}

"""The models of the paper's Tables 4 and 13, tiny: pretrained, fine-tuned and scored."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE
from tests.support.jobs import ROOT, records
from tests.support.minimal_pairs import write_pairs
from tests.support.task_files import write_published

pytest.importorskip("sklearn")
RUNS = sorted(path.stem for path in (ROOT / "configs" / "runs").glob("ablation_*h100.yaml"))
TINY = (
    "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.ffn_hidden_size=64",
    "model.vocab_size=auto", "model.max_position_embeddings=64",
    "model.max_relative_positions=64", "model.position_buckets=null", "data.sequence_length=48",
    "data.num_workers=0",
    "precision.dtype=fp32", "parallel.engine=plain", "train.device=cpu", "log.tensorboard=false",
    "log.level=warning", "train.global_batch_size=4", "train.micro_batch_size=4", "train.steps=2",
    "optimizer.warmup_steps=1", "train.eval_every=null",
)  # fmt: skip
TASKS = {
    "mnli": "splits: {train: train.tsv, dev: dev_matched.tsv}",
    "squad1": "splits: {train: dev-v1.1.json, dev: dev-v1.1.json}",
    "squad2": "splits: {train: dev-v2.0.json, dev: dev-v2.0.json}",
    "race": "splits: {train: dev, dev: dev}",
}
"""The tables' tasks, with the splits that the small files have."""


def tasks_of(name: str) -> list[str]:
    """Return all tasks for the whole model, and for each ablation another one."""
    tasks = list(TASKS)
    return tasks if name == "ablation_h100" else [tasks[RUNS.index(name) % len(tasks)]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "ablation_h100" else pytest.mark.nightly)
        for name in RUNS
    ],
)
def test_a_tiny_version_runs_end_to_end(name: str, run_yaml: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    text = run_yaml.parent
    data = (
        f"data.train=[{text / 'docs_text_document'}]", f"tokenizer.path={text / 'tokenizer'}",
    )  # fmt: skip
    pairs = (f"train.blimp_data={write_pairs(tmp_path / 'pairs')}", "train.blimp_every=2")
    config = f"configs/runs/{name}.yaml"
    assert main(["pretrain", config, *TINY, *data, *pairs, f"train.run_dir={run_dir}"]) == EXIT_DONE
    assert 0 <= records(run_dir, "minimal_pairs")[2]["accuracy"] <= 1

    published = write_published(tmp_path / "published")
    for task in tasks_of(name):
        splits = TASKS[task]
        file = tmp_path / f"{task}.yaml"
        file.write_text(f"base: configs/tasks/{task}.yaml\n{splits}\n")
        folder, output = tmp_path / task, tmp_path / f"{task}.json"
        arguments = [str(file), "--data", str(published / task)]
        settings = [word for word in TINY if not word.startswith("model.")]
        settings += ["optimizer.warmup_fraction=null", f"train.run_dir={folder}"]
        assert main(["finetune", *arguments, "--model", str(run_dir), *settings]) == EXIT_DONE
        command = ["evaluate", "task", *arguments, "--model", str(folder), "--output", str(output)]
        assert main(command) == EXIT_DONE
        scores = json.loads(output.read_text())
        assert math.isfinite(scores["loss"])
        assert records(folder, "validation")[2]["loss"] == pytest.approx(scores["loss"], rel=1e-4)

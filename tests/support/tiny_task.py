"""A tiny labelled task and a tiny model to fine-tune on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, step_dir
from megatron_deberta.config import save_config
from megatron_deberta.config.schema import RunConfig

MODEL = Path(__file__).parents[1] / "golden" / "c6955b0" / "hf"
WORDS = "the cat sat on a mat and saw one dog run far from its home in the rain".split()
TASK = """\
name: tiny
head: classification
reader: tsv
splits: {train: train.tsv, dev: dev.tsv, test: test.tsv}
columns: {text: text, label: label}
labels: [bad, good]
metrics: [accuracy]
max_length: 24
"""


def write_task(folder: Path) -> Path:
    """Write ``task.yaml`` and its data; the label says whether the first word is early in WORDS."""
    folder.mkdir()
    for name, size in (("train", 37), ("dev", 11), ("test", 5)):
        lines = ["text\tlabel"]
        for number in range(size):
            first = (number * 7 + size) % len(WORDS)
            text = " ".join(WORDS[first : first + 1 + number % 6] or WORDS[:2])
            lines.append(f"{text}\t{'good' if first < 9 else 'bad'}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    (folder / "task.yaml").write_text(TASK)
    return folder


def write_finished_run(folder: Path, *scores: float, steps: int = 0) -> None:
    """Write config, metrics and last commit of a run with a validation after each step.

    Args:
        folder: folder of the run.
        scores: accuracy after each step; the checkpoints of all steps are committed.
        steps: ``train.steps``; 0: as many as scores.
    """
    folder.mkdir(parents=True)
    lines = [
        {"kind": "validation", "step": number, "loss": 1.0, "accuracy": score, "score": score}
        for number, score in enumerate(scores, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = RunConfig()
    train = replace(config.train, steps=steps or len(scores), run_dir=str(folder))
    optimizer = replace(config.optimizer, warmup_steps=0)
    save_config(replace(config, train=train, optimizer=optimizer), folder / "config.yaml")
    for step in range(1, len(scores) + 1):
        step_dir(folder, step).mkdir(parents=True)
        (step_dir(folder, step) / COMMITTED_FILE).touch()

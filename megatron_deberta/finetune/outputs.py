"""Fine-tuned runs on disk, and their models' outputs for a split, kept in the run folder."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_deberta.checkpoint.layout import find_best
from megatron_deberta.checkpoint.store import find_newest
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.files import write_atomically
from megatron_deberta.finetune.data import Split, read_split
from megatron_deberta.finetune.predict import open_predictor
from megatron_deberta.tasks.scoring import Outputs
from megatron_deberta.tasks.task import TaskConfig, load_task, run_task_name
from megatron_deberta.tokenizer import load_tokenizer

CONFIG_FILE = "config.yaml"
"""In the run folder: the run's resolved config."""
SEARCH_RESULTS = "results.json"
"""In the folder of a search: its results, which name the best cell."""
FOLDER = "outputs"
"""In the run folder: outputs by split and examples."""


@dataclass(frozen=True, slots=True)
class FinetunedRun:
    """A fine-tuned run.

    Attributes:
        folder: its folder.
        config: its config.
        task: its task.
        checkpoint: its best checkpoint, or else its newest.
    """

    folder: Path
    config: RunConfig
    task: TaskConfig
    checkpoint: Path


@dataclass(frozen=True, slots=True)
class SplitOutputs:
    """Outputs of a model for a split; see ``tasks.scoring.predict``."""

    split: Split
    outputs: Outputs


def find_runs(folder: Path) -> list[FinetunedRun]:
    """Return the fine-tuned runs in a folder, by task, seed and name.

    Of a search (``SEARCH_RESULTS``), these are the runs of the best cell.

    Args:
        folder: a run, a folder of runs at any depth, or a search.

    Raises:
        ConfigError: there are none with a checkpoint.
    """
    runs = []
    for path in _run_folders(_best_cell(folder)):
        config, checkpoint = load_config(path / CONFIG_FILE), find_best(path) or find_newest(path)
        if config.finetune.task and checkpoint is not None:
            task = load_task(run_task_name(config.finetune.task, path))
            runs.append(FinetunedRun(path, config, task, checkpoint))
    if not runs:
        raise ConfigError(f"{folder}: no fine-tuned run with a checkpoint in this folder")
    return sorted(runs, key=lambda r: (r.task.name, r.config.train.seed, str(r.folder)))


def _best_cell(folder: Path) -> Path:
    """Return the folder of a search's best cell; other folders are unchanged."""
    file = folder / SEARCH_RESULTS
    if not file.is_file():
        return folder
    try:
        best = json.loads(file.read_bytes())["best"]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{file}: not the results of a search; write it again: --table") from None
    if best is None:
        raise ConfigError(f"{file}: no cell of the search is complete; finish the search first")
    return folder / str(best)


def _run_folders(folder: Path) -> list[Path]:
    found = []
    for path, names, files in os.walk(folder):
        if CONFIG_FILE in files:
            found.append(Path(path))
            names.clear()
    return found


def read_outputs(run: FinetunedRun, split: str, data: str = "") -> SplitOutputs:
    """Return the outputs of a run's best checkpoint; compute them if they are not kept yet.

    Args:
        run: the run.
        split: name of the split.
        data: folder of the task's files; empty: that of the run.

    Raises:
        ConfigError: the task has no such split.
        DataError: a file is missing or malformed.
    """
    if split not in run.task.splits:
        known = ", ".join(run.task.splits)
        raise ConfigError(f"--split {split}: task {run.task.name} has {known}")
    data = data or run.config.finetune.data
    tokenizer = load_tokenizer(run.config.tokenizer.path)
    config = run.config
    config = replace(config, finetune=replace(config.finetune, data=data))
    found = read_split(config, run.task, split, tokenizer)
    path = (
        run.folder / FOLDER / f"{split}-{run.checkpoint.name}-{found.encoded.fingerprint[:16]}.npy"
    )
    if path.exists():
        return SplitOutputs(found, np.load(path, allow_pickle=False))
    name = run_task_name(config.finetune.task, run.folder)
    with open_predictor(name, run.folder, data) as predictor:
        _, outputs, _ = predictor.run(split)
    path.parent.mkdir(exist_ok=True)
    content = io.BytesIO()
    np.save(content, outputs, allow_pickle=False)
    write_atomically(path, content.getvalue())
    return SplitOutputs(found, outputs)


def check_same_task(runs: Sequence[FinetunedRun]) -> TaskConfig:
    """Return the task of runs.

    Raises:
        ConfigError: they have several tasks.
    """
    names = sorted({run.task.name for run in runs})
    if len(names) > 1:
        raise ConfigError(f"runs of several tasks ({', '.join(names)}); give runs of one task")
    return runs[0].task

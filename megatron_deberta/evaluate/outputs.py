"""Fine-tuned runs on disk, their models' outputs for a split (kept in the run folder), ensembles.

Source of ensembles: RoBERTa (arXiv:1907.11692, section 5.1) ensembles 5 to 7 of several runs per
task; the predictions are the mean probabilities, or for STS-B the mean scores.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from megatron_deberta.checkpoint.layout import committed_steps, find_best, read_mark, step_dir
from megatron_deberta.checkpoint.store import find_newest
from megatron_deberta.config import load_config
from megatron_deberta.config.phases import last_step
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import ConfigError, DataError, MegatronDebertaError
from megatron_deberta.evaluate.predict import open_predictor
from megatron_deberta.evaluate.selection import SCORE, Selection, record_selection
from megatron_deberta.evaluate.splits import Split, output_shape, read_split
from megatron_deberta.evaluate.thresholds import checkpoint_thresholds
from megatron_deberta.files import NPY_ERRORS, write_atomically
from megatron_deberta.model.heads import num_outputs
from megatron_deberta.observe.metrics import FILE_NAME as METRICS_FILE
from megatron_deberta.observe.metrics import read_metrics
from megatron_deberta.parsing import read_json
from megatron_deberta.tasks.encoded import EncodedDataset
from megatron_deberta.tasks.scoring import (
    Outputs,
    nonfinite_rows,
    score,
    sigmoid,
    softmax,
    with_best_thresholds,
)
from megatron_deberta.tasks.task import DEV, Head, TaskConfig, load_task, run_task_name
from megatron_deberta.tokenizer import load_tokenizer

CONFIG_FILE = "config.yaml"
"""In the run folder: the run's resolved config."""


SEARCH_RESULTS = "results.json"
"""In the folder of a search: its results, which name the best cell."""


FOLDER = "outputs"
"""In the run folder: outputs by split and examples."""


logger = logging.getLogger(__name__)


_WRITING_SECONDS = 60
"""Age from which a file of outputs without a record is a leftover."""


_MAX_HEADER = 1 << 16
"""Bytes of a ``.npy`` file before its numbers."""


class _Kept(TypedDict):
    """Beside kept outputs.

    Attributes:
        weights: content of the checkpoint's ``COMMITTED``, the SHA-256 of its manifest.
        data: fingerprint of the encoded examples.
        sha256: of the file of outputs.
    """

    weights: str
    data: str
    sha256: str


_CellFolder = Annotated[str, Field(pattern=r"^cells/[A-Za-z0-9_=+-][A-Za-z0-9.,_=+-]*$")]


class _SearchCell(TypedDict):
    """A cell in ``SEARCH_RESULTS``."""

    folder: _CellFolder
    runs: int
    scores: dict[str, float]


class _SearchResults(TypedDict):
    """What is read of ``SEARCH_RESULTS``."""

    best: _CellFolder | None
    metric: NotRequired[str]
    cells: NotRequired[list[_SearchCell]]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Validation of the checkpoint that a finished run is represented by.

    Attributes:
        split: the split on which the score was computed, always the one for validation.
        metric: name of the score, the task's first metric.
        score: of the best checkpoint, or else of the last one; None: it was infinite or not a
            number, as after a divergence.
        step: of that checkpoint.
        steps: number of steps of the run.
        metrics: all metrics at that step; empty if the record was removed.
    """

    split: str
    metric: str
    score: float | None
    step: int
    steps: int
    metrics: dict[str, float | None]


def finished_validation(run_dir: Path, metric: str) -> RunResult | None:
    """Return the validation of a finished run's checkpoint; None: the run has not finished.

    A run has finished when the checkpoint of its last step is committed and the validation of this
    step is recorded. Neither alone suffices: a signal can interrupt the last validation, and a
    kill between both leaves only the record. The checkpoint is the best one, or else the last one,
    as in ``find_runs``; the best one is recorded if a killed process has not done so.

    Args:
        run_dir: folder of the run.
        metric: name of the task's first metric.

    Raises:
        DataError: a file of the run is damaged.
        CheckpointError: ``best.json`` is damaged.
    """
    config = run_dir / CONFIG_FILE
    found = _progress(run_dir, load_config(config)) if config.exists() else None
    if found is None or not found.has_ended or found.last not in found.validations:
        return None
    selection, last = found.selection, found.last
    record_selection(run_dir, selection)
    step = last if selection.best_step is None else selection.best_step
    validation = found.validations.get(step, {})
    known = {k: v for k, v in validation.items() if k not in ("step", "kind", SCORE)}
    numbers = {key: v for key, v in known.items() if isinstance(v, int | float | None)}
    score = numbers.get(metric) if selection.best_step is None else selection.best_score
    return RunResult(split=DEV, metric=metric, score=score, step=step, steps=last, metrics=numbers)


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far a fine-tuning run is.

    Attributes:
        last: step of its last checkpoint.
        selection: at this step.
        has_ended: this is the run's last step; its validation may be missing.
        validations: records by step.
    """

    last: int
    selection: Selection
    has_ended: bool
    validations: dict[int, dict[str, Any]]


def _progress(run_dir: Path, run: RunConfig) -> _Progress | None:
    """Return how far a run is; None: it has no checkpoint or no records."""
    metrics, last = run_dir / METRICS_FILE, max(committed_steps(run_dir), default=0)
    if not last or not metrics.exists():
        return None
    records, patience = read_metrics(metrics), run.finetune.patience
    selection = Selection.of_run(run_dir, records, last, keeps_best=run.finetune.keep_best)
    is_converged = patience is not None and patience <= selection.num_worse
    has_ended = last >= last_step(run) or is_converged
    validations = {r["step"]: r for r in records if r["kind"] == "validation"}
    return _Progress(last, selection, has_ended, validations)


def find_runs(folder: Path) -> list[FinetunedRun]:
    """Return the fine-tuned runs in a folder, by task, seed and name.

    Of a search (``SEARCH_RESULTS``), these are the runs of the best cell. Runs without a checkpoint
    are left out, and unfinished ones are named, each in a warning.

    Args:
        folder: a run, a folder of runs at any depth, or a search.

    Raises:
        ConfigError: there are none with a checkpoint.
    """
    runs = []
    for path in sorted(_run_folders(_best_cell(folder))):
        config, checkpoint = load_config(path / CONFIG_FILE), find_best(path) or find_newest(path)
        if not config.finetune.task:
            continue
        if checkpoint is None:
            logger.warning("%s: left out, as it has no checkpoint", path)
            _remove_orphans(path)
            continue
        task = load_task(run_task_name(config.finetune.task, path))
        found = None
        try:
            found = _progress(path, config)
        except DataError as error:
            logger.warning("%s; it is not known whether this run has finished", error)
        if found is not None:
            if found.selection.best_step is not None:
                # A process that was killed after a commit may not have recorded it.
                checkpoint = step_dir(path, found.selection.best_step)
            if not found.has_ended or (DEV in task.splits and found.last not in found.validations):
                logger.warning(
                    "%s: this run has not finished (step %s of %s); results are those of %s",
                    path, f"{found.last:,}", f"{last_step(config):,}", checkpoint.name,
                )  # fmt: skip
        task = checkpoint_thresholds(task, checkpoint)
        runs.append(FinetunedRun(path, config, task, checkpoint))
    if not runs:
        raise ConfigError(f"{folder}: no fine-tuned run with a checkpoint in this folder")
    return sorted(runs, key=lambda r: (r.task.name, r.config.train.seed, str(r.folder)))


def _best_cell(folder: Path) -> Path:
    """Return the folder of a search's best cell; other folders are unchanged."""
    file = folder / SEARCH_RESULTS
    if not file.is_file():
        return folder
    what, remedy = "the results of a search", "write it again: --table"
    found = read_json(file, _SearchResults, what, remedy=remedy, ignore_unknown=True)
    unfinished = 0
    for cell in found.get("cells", []):
        unfinished += cell["runs"] - len(cell["scores"])
        for run in (folder / cell["folder"]).glob("seed_*"):
            if run.name.removeprefix("seed_") in cell["scores"]:
                continue
            result = finished_validation(run, found.get("metric", ""))
            if result is not None and result.score is not None:
                raise ConfigError(f"{file}: {run} has finished since it was written; {remedy}")
    best = found["best"]
    if best is None:
        raise ConfigError(f"{file}: no cell of the search is complete; finish the search first")
    if unfinished:
        logger.warning(
            "%s: %d runs of the search have no score yet; %s is the best of the complete cells",
            file, unfinished, best,
        )  # fmt: skip
    return folder / best


def _run_folders(folder: Path) -> list[Path]:
    found = []
    for path, names, files in os.walk(folder):
        if CONFIG_FILE in files:
            found.append(Path(path))
            names.clear()
    return found


def read_outputs(run: FinetunedRun, split: str, data: str = "") -> tuple[Split, Outputs]:
    """Return a split, and the outputs of a run's best checkpoint; compute those that are not kept.

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
    data = data or run.config.finetune.data or ""
    tokenizer = load_tokenizer(run.config.tokenizer.path or "")
    config = run.config
    config = replace(config, finetune=replace(config.finetune, data=data))
    found = read_split(config, run.task, split, tokenizer, run.folder)
    weights = read_mark(run.checkpoint)
    fingerprint = found.encoded.fingerprint
    key = hashlib.sha256(f"{weights} {fingerprint}".encode()).hexdigest()[:16]
    path = run.folder / FOLDER / f"{split}-{run.checkpoint.name}-{key}.npy"
    _remove_orphans(run.folder)
    shape = output_shape(run.task.head, found.encoded, num_outputs(config.model))
    outputs = _read_kept(path, weights, fingerprint, shape)
    if outputs is None:
        # Not by the run's folder, whose best checkpoint may be another one meanwhile.
        name = run_task_name(config.finetune.task or "", run.folder)
        with open_predictor(name, run.checkpoint, data) as predictor:
            predicted, outputs, _ = predictor.run(split)
        if predicted.encoded.fingerprint != fingerprint:
            raise DataError(
                f"{run.checkpoint}: its tokenizer or data.sequence_length differ from those of "
                f"{run.folder / CONFIG_FILE}; restore this file"
            )
        _keep(path, outputs, weights, fingerprint)
    if bad := nonfinite_rows(found.encoded, outputs):
        raise DataError(
            f"{run.checkpoint}: outputs for the split {split} are infinite or not a number in "
            f"{bad:,} of {found.encoded.num_rows:,} rows; fine-tune again with a lower "
            "optimizer.learning_rate"
        )
    return found, outputs


def _remove_orphans(run_dir: Path) -> None:
    """Remove the kept outputs of checkpoints that exist no longer, and files without a record."""
    marks = {read_mark(step_dir(run_dir, step)) for step in committed_steps(run_dir)}
    used = set()
    # Another process may just write files.
    before = time.time() - _WRITING_SECONDS
    with contextlib.suppress(OSError):
        for record in (run_dir / FOLDER).glob("*.json"):
            with contextlib.suppress(MegatronDebertaError):
                kept = read_json(record, _Kept, "a record of outputs", remedy="remove it")
                if kept["weights"] in marks:
                    used |= {record, record.with_suffix(".npy")}
        for path in (run_dir / FOLDER).iterdir():
            if path not in used and path.lstat().st_mtime < before:
                path.unlink()


def _read_kept(
    path: Path, weights: str, data: str, shape: tuple[int, ...]
) -> npt.NDArray[np.float32] | None:
    """Return kept outputs; None: there are none of these weights and examples, or damaged ones."""
    record = path.with_suffix(".json")
    if not (path.is_file() and record.is_file()):
        return None
    try:
        kept = read_json(record, _Kept, "a record of outputs", remedy="remove it")
        if (kept["weights"], kept["data"]) != (weights, data):
            raise DataError("of other weights or examples")
        if path.stat().st_size > _MAX_HEADER + math.prod(shape) * 4:
            raise DataError("larger than it can be")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != kept["sha256"]:
            raise DataError("its SHA-256 differs from the one recorded")
        outputs: npt.NDArray[np.float32] = np.load(io.BytesIO(content), allow_pickle=False)
        if outputs.shape != shape or outputs.dtype != np.float32:
            raise DataError(f"an array {outputs.dtype} {outputs.shape}, not float32 {shape}")
    except (MegatronDebertaError, *NPY_ERRORS) as error:
        logger.warning("%s: %s; the outputs are computed again", path, error)
        return None
    return outputs


def _keep(path: Path, outputs: Outputs, weights: str, data: str) -> None:
    """Write outputs, then the record without which they are not read."""
    path.parent.mkdir(exist_ok=True)
    stream = io.BytesIO()
    np.save(stream, outputs, allow_pickle=False)
    content = stream.getvalue()
    write_atomically(path, content)
    kept = _Kept(weights=weights, data=data, sha256=hashlib.sha256(content).hexdigest())
    write_atomically(path.with_suffix(".json"), (json.dumps(kept, indent=1) + "\n").encode())


def check_same_task(runs: Sequence[FinetunedRun]) -> TaskConfig:
    """Return the task of runs.

    Raises:
        ConfigError: they have several tasks.
    """
    names = sorted({run.task.name for run in runs})
    if len(names) > 1:
        raise ConfigError(f"runs of several tasks ({', '.join(names)}); give runs of one task")
    return runs[0].task


_LEAST = 1e-30
"""Smaller probabilities count as this in logarithms."""


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Runs whose predictions are averaged.

    Attributes:
        task: the task.
        scores: score on dev of every candidate, best first, with its run.
        members: the best runs.
        metrics: metrics of the ensemble on dev.
        data: folder of the task's files; empty: those of the runs.
    """

    task: TaskConfig
    scores: tuple[tuple[float, FinetunedRun], ...]
    members: tuple[FinetunedRun, ...]
    metrics: dict[str, float]
    data: str

    def outputs(self, split: str) -> tuple[Split, Outputs]:
        """Return a split, and the ensemble's outputs for it."""
        return combined_outputs(self.task, self.members, split, self.data)


def build_ensemble(
    task: TaskConfig, runs: Sequence[FinetunedRun], best: int, data: str = ""
) -> Ensemble:
    """Select the best runs on dev; of equal ones, the first.

    Args:
        task: the runs' task.
        runs: the candidates.
        best: number of members.
        data: folder of the task's files; empty: those of the runs.

    Raises:
        ConfigError: there are fewer runs.
    """
    if best > len(runs):
        raise ConfigError(f"--best {best}: there are only {len(runs)} runs; lower it, or add runs")
    metric = task.metrics[0]
    scored = []
    for run in runs:
        split, outputs = read_outputs(run, DEV, data)
        scored.append((score(run.task, split.examples, split.encoded, outputs)[metric], run))
    scored.sort(key=lambda pair: -pair[0])
    members = tuple(run for _, run in scored[:best])
    # Its thresholds may be those of a run that is no member.
    task = members[0].task
    split, outputs = combined_outputs(task, members, DEV, data)
    # Those of the members do not suit their mean.
    if len({run.task.thresholds for run in members}) > 1:
        task = replace(task, thresholds=())
        task = with_best_thresholds(task, split.examples, split.encoded, outputs)
    metrics = score(task, split.examples, split.encoded, outputs)
    return Ensemble(task, tuple(scored), members, metrics, data)


def combined_outputs(
    task: TaskConfig, members: Sequence[FinetunedRun], split: str, data: str
) -> tuple[Split, Outputs]:
    """Return a split and the mean outputs of several runs for it.

    Args:
        task: the task.
        members: the runs.
        split: name of the split.
        data: folder of the data.

    Raises:
        ConfigError: the runs encode the examples, or pool their windows, differently.
    """
    found = [read_outputs(run, split, data) for run in members]
    first = found[0][0]
    for run, (other, _) in zip(members, found, strict=True):
        is_pooled = run.task.long_text == members[0].task.long_text
        if other.encoded.fingerprint != first.encoded.fingerprint or not is_pooled:
            raise ConfigError(
                f"{run.folder} and {members[0].folder} have different tokenizers, lengths, "
                "long_text or examples; give runs with the same"
            )
    return first, mean_outputs(task.head, first.encoded, [outputs for _, outputs in found])


def mean_outputs(head: Head, encoded: EncodedDataset, outputs: Sequence[Outputs]) -> Outputs:
    """Return the logarithms of mean probabilities (of several labels per example, the log-odds).

    In regression and of passages, return mean scores; of embeddings, those of all models side by
    side: their cosine is the mean of the cosines.

    The probabilities of spans are those of start and end over all windows of an example, so that
    differences between windows count.

    Args:
        head: of the models.
        encoded: the examples.
        outputs: of each model; see ``tasks.scoring.predict``.
    """
    if head in ("regression", "rerank"):
        return np.asarray(np.mean(outputs, axis=0), np.float32)
    if head == "embed":
        lengths = [np.linalg.norm(each, axis=1, keepdims=True) for each in outputs]
        parts = [each / np.maximum(n, 1e-12) for each, n in zip(outputs, lengths, strict=True)]
        return np.concatenate(parts, axis=1)
    if head == "multilabel":
        probabilities = np.mean([sigmoid(values) for values in outputs], axis=0)
        sides = np.maximum([probabilities, 1 - probabilities], _LEAST)
        return np.asarray(np.log(sides[0] / sides[1]), np.float32)
    members = [_probabilities(head, encoded, values) for values in outputs]
    logarithms = np.log(np.maximum(np.mean(members, axis=0), _LEAST))
    return np.asarray(logarithms, np.float32)


def _probabilities(
    head: Head, encoded: EncodedDataset, outputs: Outputs
) -> npt.NDArray[np.float64]:
    """Return probabilities of classes; of an example's choices; of its start and end tokens."""
    if head in ("classification", "tokens"):
        return softmax(outputs)
    logits = outputs.astype(np.float64)
    borders = encoded.example_offsets
    if head == "spans":
        borders = encoded.row_offsets[borders]
    sizes = np.diff(borders)
    shifted = np.exp(logits - np.repeat(np.maximum.reduceat(logits, borders[:-1]), sizes, axis=0))
    total = np.repeat(np.add.reduceat(shifted, borders[:-1]), sizes, axis=0)
    return np.asarray(shifted / total, np.float64)

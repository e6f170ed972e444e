"""Thresholds of labels, from the validation of a run or the ``config.json`` of an export."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatron_deberta.checkpoint.layout import step_dir
from megatron_deberta.errors import CheckpointError
from megatron_deberta.evaluate.models import SourceModel
from megatron_deberta.hf.config import THRESHOLDS_FIELD
from megatron_deberta.tasks.class_scores import recorded_thresholds
from megatron_deberta.tasks.scoring import DEFAULT_THRESHOLD
from megatron_deberta.tasks.task import TaskConfig

logger = logging.getLogger(__name__)


def checkpoint_thresholds(task: TaskConfig, checkpoint: Path) -> TaskConfig:
    """Return a task with the thresholds that the validation of a checkpoint has found.

    Args:
        task: unchanged if it has thresholds, or a head that needs none.
        checkpoint: in the folder of its run.
    """
    if task.head != "multilabel":
        return task
    path, found = checkpoint.absolute(), dict[str, float]()
    number = path.name.rpartition("_")[2]
    # A checkpoint that was copied to another place has no records.
    if number.isdecimal() and step_dir(path.parents[1], int(number)) == path:
        found = recorded_thresholds(path.parents[1], int(number))
    return _with_thresholds(task, found, checkpoint)


def model_thresholds(task: TaskConfig, source: SourceModel) -> TaskConfig:
    """Return a task with the thresholds of a model; of an export, those in its ``config.json``.

    Args:
        task: unchanged if it has thresholds, or a head that needs none.
        source: the model.

    Raises:
        CheckpointError: the thresholds of an export are no probabilities.
    """
    if source.run is not None:
        return checkpoint_thresholds(task, source.path)
    found = source.fields.get(THRESHOLDS_FIELD, {})
    numbers = list(found.values()) if isinstance(found, dict) else [found]
    if not all(type(number) is float and 0 < number < 1 for number in numbers):
        raise CheckpointError(
            f"{source.path}: config.json: {THRESHOLDS_FIELD}={str(found)[:80]} is not an object "
            "with a number between 0 and 1 for each label; correct or remove it"
        )
    return _with_thresholds(task, found, source.path)


def thresholds_by_name(task: TaskConfig) -> dict[str, float]:
    """Return the thresholds of a task by the names of its labels; empty if it has none."""
    if not task.thresholds:
        return {}
    names = list(task.id2label.values())
    values = task.thresholds * (len(names) if len(task.thresholds) == 1 else 1)
    return dict(zip(names, values, strict=True))


def _with_thresholds(task: TaskConfig, found: Mapping[str, float], where: Path) -> TaskConfig:
    if task.head != "multilabel" or task.thresholds:
        return task
    names = list(task.id2label.values())
    if missing := [name for name in names if name not in found]:
        logger.warning(
            "%s has no threshold for %d of %d labels (%s); they are predicted from a probability "
            "of %g; set the task's thresholds to choose others",
            where, len(missing), len(names), missing[0], DEFAULT_THRESHOLD,
        )  # fmt: skip
    return replace(task, thresholds=tuple(found.get(name, DEFAULT_THRESHOLD) for name in names))

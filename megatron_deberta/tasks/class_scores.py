"""Precision, recall and F1 of single classes or entity types, and the confusion matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from megatron_deberta.config.schema import CLASS_HEADS
from megatron_deberta.files import MAX_RECORD_BYTES, read_regular
from megatron_deberta.parsing import parse_json
from megatron_deberta.tasks.examples import Example, Prediction, sentences
from megatron_deberta.tasks.metrics import class_flags
from megatron_deberta.tasks.scoring import DEFAULT_THRESHOLD
from megatron_deberta.tasks.task import TaskConfig, entities, entity_labels

FILE_NAME = "class_scores.jsonl"
"""In the folder of a fine-tuning run: the scores of each validation."""
MAX_CLASSES = 200
"""Tasks with more classes have no scores by class."""
_RECORDED = ("name", "labelled", "predicted", "right", "precision", "recall", "f1")


class _Class(TypedDict):
    """What is read of a class in a record."""

    name: str
    threshold: NotRequired[Annotated[float, Field(gt=0, lt=1)]]


class _Record(TypedDict):
    """What is read of a line of ``FILE_NAME``."""

    step: int
    classes: list[_Class]


@dataclass(frozen=True, slots=True)
class ClassScore:
    """Counts of a class, or of a type of entity.

    Attributes:
        name: of the class.
        right: examples (entities, words) that are of the class and predicted so.
        labelled: those of the class.
        predicted: those predicted to be.
        threshold: probability from which it is predicted; None: it is the most probable one.
    """

    name: str
    right: int
    labelled: int
    predicted: int
    threshold: float | None = None

    @property
    def precision(self) -> float:
        """Share of the predicted ones that are right; 0 if there are none."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of the labelled ones that are found; 0 if there are none."""
        return self.right / self.labelled if self.labelled else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall; 0 if nothing is right."""
        return 2 * self.right / (self.labelled + self.predicted) if self.right else 0.0


@dataclass(frozen=True, slots=True)
class ClassScores:
    """Scores by class.

    Attributes:
        unit: what is counted: ``examples``, ``entities`` or ``words``.
        classes: one per class, in the task's order; of entities by name.
        confusion: examples by class, one row per label and one column per prediction; empty for
            taggers.
    """

    unit: str
    classes: tuple[ClassScore, ...]
    confusion: tuple[tuple[int, ...], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as JSON types."""
        return {
            "unit": self.unit,
            "classes": [
                {
                    **{name: getattr(each, name) for name in _RECORDED},
                    **({} if each.threshold is None else {"threshold": each.threshold}),
                }
                for each in self.classes
            ],
            "confusion": [list(row) for row in self.confusion],
        }


def class_scores(
    task: TaskConfig, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> ClassScores | None:
    """Compute scores by class; None for tasks without classes, or with more than MAX_CLASSES.

    Multilabel tasks have no such limit, since the thresholds are recorded with the scores.

    Args:
        task: the task.
        examples: labelled examples.
        predictions: their predictions, in the same order.
    """
    has_thresholds = task.head == "multilabel"
    if task.head not in CLASS_HEADS or (len(task.labels) > MAX_CLASSES and not has_thresholds):
        return None
    if task.head == "tokens":
        return _tag_scores(task, examples, predictions)
    truth, found = class_flags(task, examples, predictions)
    thresholds, confusion = [None] * len(task.labels), np.zeros((0, 0), np.int64)
    if has_thresholds:
        chosen = task.thresholds or DEFAULT_THRESHOLD
        thresholds = np.broadcast_to(chosen, len(task.labels)).tolist()
    else:
        confusion = np.zeros((len(task.labels),) * 2, np.int64)
        np.add.at(confusion, (truth.argmax(axis=1), found.argmax(axis=1)), 1)
    counts = (side.sum(axis=0).tolist() for side in (truth & found, truth, found))
    columns = (task.label_names or task.labels, *counts, thresholds)
    classes = tuple(ClassScore(*each) for each in zip(*columns, strict=True))
    return ClassScores("examples", classes, tuple(map(tuple, confusion.tolist())))


def recorded_thresholds(run_dir: Path, step: int) -> dict[str, float]:
    """Return the thresholds of labels, by name, that a run's validation at a step has recorded.

    Args:
        run_dir: folder of the run.
        step: of the validation.

    Returns:
        Empty if there was no validation at this step, or the task needs no thresholds.

    Raises:
        DataError: the record is damaged.
    """
    path = run_dir / FILE_NAME
    if not path.is_file():
        return {}
    found: dict[str, float] = {}
    *lines, _incomplete = read_regular(path, MAX_RECORD_BYTES).split(b"\n")
    for number, line in enumerate(lines, 1):
        place, what, remedy = f"{path}:{number}", "a record of scores by class", "remove this line"
        record = parse_json(line, _Record, place, what, remedy=remedy, ignore_unknown=True)
        if record["step"] == step:
            classes = record["classes"]
            found = {each["name"]: each["threshold"] for each in classes if "threshold" in each}
    return found


def _tag_scores(
    task: TaskConfig, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> ClassScores:
    """Count entities by type, as conlleval does; words by label if the labels have no scheme."""
    has_scheme = entity_labels(task.labels) is not None
    right, labelled, predicted = Counter[str](), Counter[str](), Counter[str]()
    for example, prediction in zip(examples, predictions, strict=True):
        assert isinstance(prediction.value, tuple)
        truth, found = tuple(task.labels[tag] for tag in example.tags), prediction.value
        if has_scheme:
            sets = [entities(task.labels, sentences(example, side)) for side in (truth, found)]
        else:
            sets = [{(tag, at, at) for at, tag in enumerate(side)} for side in (truth, found)]
        right.update(kind for kind, *_ in sets[0] & sets[1])
        labelled.update(kind for kind, *_ in sets[0])
        predicted.update(kind for kind, *_ in sets[1])
    names = sorted({*labelled, *predicted}) if has_scheme else task.labels
    classes = tuple(
        ClassScore(name, right[name], labelled[name], predicted[name]) for name in names
    )
    return ClassScores("entities" if has_scheme else "words", classes)

"""Metrics and predictions from a model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.errors import DataError, MalformedInputError
from megatron_deberta.tasks.encoding import EncodedDataset
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.metrics import class_metrics, regression_metrics, tag_metrics
from megatron_deberta.tasks.spans import best_spans, span_metrics
from megatron_deberta.tasks.task import TaskConfig

Outputs = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction for one example.

    Attributes:
        id: identifier of the example.
        index: class index, or index of the choice; -1 for other heads.
        value: label as written in the files, score, answer text (empty: no answer), or a label
            per word.
        probabilities: one per class or choice; empty for other heads.
        null_score: spans: score of no answer minus that of the best answer.
        group: the example's group.
    """

    id: str
    index: int = -1
    value: str | float | tuple[str, ...]
    probabilities: tuple[float, ...] = ()
    null_score: float = 0.0
    group: str = ""


def predict(
    task: TaskConfig,
    examples: Sequence[Example],
    encoded: EncodedDataset,
    outputs: Outputs,
    *,
    null_threshold: float = 0.0,
    is_multi_label: bool = False,
) -> list[Prediction]:
    """Turn outputs into one prediction per example.

    Args:
        task: the task.
        examples: the examples, in the order in which they were encoded.
        encoded: their encoding.
        outputs: float32: classification ``[rows, classes]``, regression ``[rows]``, spans
            ``[total, 2]`` (logits of start and end), tokens ``[total, classes]``, choices
            ``[rows]``.
        null_threshold: spans: predict no answer if ``null_score`` is above it; ``score`` finds the
            best one on a dev split as ``null_threshold``.
        is_multi_label: classification: each class has a probability of its own (sigmoid), as in a
            model trained with several classes per example; the value is still the most probable.

    Raises:
        DataError: outputs are infinite or not a number.
        ValueError: the outputs have another shape.
    """
    _check_outputs(task, examples, encoded, outputs)
    if is_multi_label and task.head == "classification":
        return _predict_classes(task, examples, encoded, outputs, sigmoid)
    if task.head == "spans":
        return [
            Prediction(
                id=example.id,
                value="" if task.unanswerable and best.null_score > null_threshold else best.text,
                null_score=best.null_score,
                group=example.group,
            )
            for example, best in zip(
                examples, best_spans(task, examples, encoded, outputs), strict=True
            )
        ]
    return _PREDICT[task.head](task, examples, encoded, outputs)


def score(
    task: TaskConfig, examples: Sequence[Example], encoded: EncodedDataset, outputs: Outputs
) -> dict[str, float]:
    """Compute the task's metrics.

    Args:
        task: the task.
        examples: labelled examples, in the order in which they were encoded.
        encoded: their encoding.
        outputs: see ``predict``.

    Returns:
        Metrics in [0, 1] (correlations in [-1, 1]) in the task's order, then further figures such
        as ``null_threshold``.

    Raises:
        DataError: examples have no labels, or outputs are infinite or not a number.
        ValueError: the outputs have another shape.
    """
    _check_outputs(task, examples, encoded, outputs)
    _require_labels(task, examples)
    if task.head == "spans":
        return span_metrics(task, examples, best_spans(task, examples, encoded, outputs))
    if task.head == "regression":
        scores = np.array([example.label for example in examples], np.float64)
        return regression_metrics(task.metrics, scores, outputs.astype(np.float64))
    predictions = predict(task, examples, encoded, outputs)
    if task.head == "tokens":
        truth, found = [], []
        for example, prediction in zip(examples, predictions, strict=True):
            assert isinstance(prediction.value, tuple)
            tags = tuple(task.labels[tag] for tag in example.tags)
            truth += sentences(example, tags)
            found += sentences(example, prediction.value)
        return tag_metrics(task, truth, found)
    labels = np.array([example.label for example in examples], np.int64)
    indices = np.array([prediction.index for prediction in predictions], np.int64)
    return class_metrics(task, labels, indices, [example.group for example in examples])


def sentences(example: Example, values: tuple[str, ...]) -> list[list[str]]:
    """Split values per word at the sentence breaks of an example."""
    borders = [0, *example.breaks, len(values)]
    return [list(values[a:b]) for a, b in zip(borders, borders[1:], strict=False)]


def _require_labels(task: TaskConfig, examples: Sequence[Example]) -> None:
    unlabelled = [e.id for e in examples if e.label is None and not e.tags and e.answers is None]
    if unlabelled:
        raise MalformedInputError(
            f"task {task.name}: {len(unlabelled)} of {len(examples)} examples have no label "
            f"(first: {unlabelled[0]}); predict them instead"
        )


def nonfinite_rows(encoded: EncodedDataset, outputs: Outputs) -> int:
    """Return the number of rows with an output that is infinite or not a number."""
    finite = np.isfinite(outputs)
    if finite.all():
        return 0
    bad = ~finite.reshape(len(outputs), -1).all(axis=1)
    if len(outputs) != encoded.num_rows:
        # One output per token
        bad = np.logical_or.reduceat(bad, encoded.row_offsets[:-1])
    return int(bad.sum())


def _check_outputs(
    task: TaskConfig, examples: Sequence[Example], encoded: EncodedDataset, outputs: Outputs
) -> None:
    rows, total, classes = encoded.num_rows, len(encoded.input_ids), len(task.labels)
    shapes: dict[str, tuple[int, ...]] = {
        "classification": (rows, classes),
        "regression": (rows,),
        "spans": (total, 2),
        "tokens": (total, classes),
        "choices": (rows,),
    }
    if outputs.shape != shapes[task.head]:
        raise ValueError(
            f"head {task.head}: outputs are {list(outputs.shape)}, not {list(shapes[task.head])}"
        )
    if encoded.num_examples != len(examples):
        raise ValueError(f"{len(examples)} examples, but {encoded.num_examples} were encoded")
    # The largest of such outputs is no prediction, but numpy names one.
    if bad := nonfinite_rows(encoded, outputs):
        raise DataError(
            f"task {task.name}: the model's outputs are infinite or not a number in {bad:,} of "
            f"{encoded.num_rows:,} rows; fine-tune again with a lower optimizer.learning_rate"
        )


def softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return probabilities over the last dimension."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    result: npt.NDArray[np.float64] = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def sigmoid(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the probability of each value by itself."""
    # Without overflow on either side
    result: npt.NDArray[np.float64] = (1 + np.tanh(logits.astype(np.float64) / 2)) / 2
    return result


def _predict_classes(
    task: TaskConfig,
    examples: Sequence[Example],
    encoded: EncodedDataset,
    outputs: Outputs,
    to_probabilities: Callable[[Outputs], npt.NDArray[np.float64]] = softmax,
) -> list[Prediction]:
    probabilities = to_probabilities(outputs)
    indices = outputs.argmax(axis=1).tolist()
    return [
        Prediction(
            id=example.id,
            index=index,
            value=task.labels[index],
            probabilities=tuple(row.tolist()),
            group=example.group,
        )
        for example, index, row in zip(examples, indices, probabilities, strict=True)
    ]


def _predict_scores(
    task: TaskConfig, examples: Sequence[Example], encoded: EncodedDataset, outputs: Outputs
) -> list[Prediction]:
    low, high = task.label_range or (-np.inf, np.inf)
    values = np.clip(outputs.astype(np.float64), low, high).tolist()
    return [Prediction(id=e.id, value=value) for e, value in zip(examples, values, strict=True)]


def _predict_choices(
    task: TaskConfig, examples: Sequence[Example], encoded: EncodedDataset, outputs: Outputs
) -> list[Prediction]:
    found = []
    for example, logits in zip(
        examples, np.split(outputs, encoded.example_offsets[1:-1]), strict=True
    ):
        index = int(logits.argmax())
        found.append(
            Prediction(
                id=example.id,
                index=index,
                value=task.labels[index] if task.labels else str(index),
                probabilities=tuple(softmax(logits).tolist()),
                group=example.group,
            )
        )
    return found


def _predict_tags(
    task: TaskConfig, examples: Sequence[Example], encoded: EncodedDataset, outputs: Outputs
) -> list[Prediction]:
    # Each word is labelled once, and windows are in the order of the text.
    at = np.flatnonzero(encoded.word_index >= 0)
    classes = outputs[at].argmax(axis=1)
    names = np.array(task.labels, dtype=object)[classes]
    sizes = [len(example.words) for example in examples]
    parts = np.split(names, np.cumsum(sizes)[:-1])
    return [
        Prediction(id=example.id, value=tuple(part.tolist()))
        for example, part in zip(examples, parts, strict=True)
    ]


_PREDICT: Mapping[str, Callable[..., list[Prediction]]] = {
    "classification": _predict_classes,
    "regression": _predict_scores,
    "tokens": _predict_tags,
    "choices": _predict_choices,
}

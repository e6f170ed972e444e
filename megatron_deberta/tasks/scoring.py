"""Metrics and predictions from a model's outputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.config.schema import GROUPED_HEADS
from megatron_deberta.errors import DataError, MalformedInputError
from megatron_deberta.tasks.encoded import EncodedDataset
from megatron_deberta.tasks.encoding import covered_span, pieces_of
from megatron_deberta.tasks.examples import Example, Prediction
from megatron_deberta.tasks.metrics import (
    CorrelationMetric,
    best_null_threshold,
    group_accuracies,
    paired_metric,
)
from megatron_deberta.tasks.task import EXAMPLE_HEADS, SCORE_HEADS, LongText, TaskConfig

Outputs = npt.NDArray[np.float32]

DEFAULT_THRESHOLD = 0.5
"""Probability from which a label is predicted, if the task has no thresholds."""

logger = logging.getLogger(__name__)


def predict(
    task: TaskConfig,
    examples: Sequence[Example],
    encoded: EncodedDataset,
    outputs: Outputs,
    *,
    null_threshold: float = 0.0,
    uses_sigmoid: bool = False,
) -> list[Prediction]:
    """Turn outputs into one prediction per example.

    Args:
        task: the task; its ``long_text`` says how windows become one prediction.
        examples: the examples, in the order in which they were encoded.
        encoded: their encoding.
        outputs: float32: classification and multilabel ``[rows, classes]``, regression ``[rows]``,
            spans ``[total, 2]`` (logits of start and end), tokens ``[total, classes]``, choices
            and rerank ``[rows]``, embed ``[rows, hidden size]``.
        null_threshold: spans: predict no answer if ``null_score`` is above it; ``score`` finds the
            best one on a dev split as ``null_threshold``.
        uses_sigmoid: classification, choices and rerank: each class, choice or passage has a
            probability of its own; the value is still the most probable one.

    Raises:
        DataError: outputs are infinite or not a number.
        ValueError: the outputs have another shape.
    """
    _check_outputs(task, examples, encoded, outputs)
    fields: dict[str, Sequence[Any]]
    if task.head == "spans":
        found = best_spans(task, examples, encoded, outputs)
        threshold = null_threshold if task.unanswerable else np.inf
        fields = {
            "value": ["" if null > threshold else text for text, null in found],
            "null_score": [null for _, null in found],
        }
    elif task.head in GROUPED_HEADS:
        fields = _predict_choices(task, encoded, outputs, uses_sigmoid)
    elif task.head == "classification":
        fields = _predict_classes(task, encoded, outputs, uses_sigmoid)
    elif task.head == "tokens":
        fields = _predict_tags(task, examples, encoded, outputs)
    elif task.head == "multilabel":
        probabilities = pool_windows(sigmoid(outputs), encoded, task.long_text)
        is_label = probabilities >= (task.thresholds or DEFAULT_THRESHOLD)
        names = np.array(task.labels, dtype=object)
        fields = {
            "value": [tuple(names[chosen].tolist()) for chosen in is_label],
            "probabilities": tuples_of(probabilities),
        }
    elif task.head == "regression":
        low, high = task.label_range or (-np.inf, np.inf)
        pooled = pool_windows(outputs.astype(np.float64), encoded, task.long_text)
        fields = {"value": np.clip(pooled, low, high).tolist()}
    elif encoded.num_rows == len(examples):
        fields = {"value": [""] * len(examples), "embedding": tuples_of(outputs)}
    else:
        fields = {"value": cosines(encoded, outputs).tolist()}
    if task.head not in EXAMPLE_HEADS:
        fields["windows"] = np.diff(encoded.example_offsets).tolist()
    return [
        Prediction(id=example.id, group=example.group, **dict(zip(fields, values, strict=True)))
        for example, *values in zip(examples, *fields.values(), strict=True)
    ]


def tuples_of(rows: Iterable[npt.NDArray[Any]]) -> list[tuple[Any, ...]]:
    """Return the values of each row."""
    return [tuple(row.tolist()) for row in rows]


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
    require_labels(task, examples)
    if task.head in SCORE_HEADS:
        # Not clipped to the range of the scores, as predictions are.
        truth = np.array([example.label for example in examples], np.float64)
        if task.head == "embed":
            found = cosines(encoded, outputs)
        else:
            found = pool_windows(outputs.astype(np.float64), encoded, task.long_text)
        return {name: CorrelationMetric(name, truth, found).value() for name in task.metrics}
    predictions = predict(task, examples, encoded, outputs, null_threshold=np.inf)
    values: dict[str, float] = {
        name: paired_metric(task, name, examples, predictions, has_best_text=True).value()
        for name in task.metrics
    }
    if task.unanswerable:
        values["null_threshold"] = best_null_threshold(task, examples, predictions)
    if task.head == "choices":
        values |= group_accuracies(examples, predictions)
    return values


def require_labels(task: TaskConfig, examples: Sequence[Example]) -> None:
    """Check that all examples have labels.

    Raises:
        MalformedInputError: one has none.
    """
    unlabelled = [
        e.id
        for e in examples
        if e.label is None and not (e.tags or e.relevance) and e.answers is None
    ]
    if unlabelled:
        raise MalformedInputError(
            f"task {task.name}: {len(unlabelled)} of {len(examples)} examples have no label "
            f"(first: {unlabelled[0]}); predict them, or use another split"
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
    is_per_token = task.head in ("spans", "tokens")
    places = len(encoded.input_ids) if is_per_token else encoded.num_rows
    width = outputs.shape[1:2] if task.head == "embed" else (task.num_labels,)
    shape = (places,) if task.head in ("regression", *GROUPED_HEADS) else (places, *width)
    if outputs.shape != shape:
        raise ValueError(f"head {task.head}: outputs are {list(outputs.shape)}, not {list(shape)}")
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


def pool_windows(
    values: npt.NDArray[np.float64], encoded: EncodedDataset, long_text: LongText
) -> npt.NDArray[np.float64]:
    """Return one value per example from the values of its windows.

    Args:
        values: probabilities ``[rows, classes]``, or scores ``[rows]``.
        encoded: the rows.
        long_text: ``max``: of each class the largest value in any of an example's rows, so that
            the probabilities can add up to more than 1; else the mean over them.
    """
    if encoded.num_rows == encoded.num_examples:
        return values
    offsets = encoded.example_offsets
    if long_text == "max":
        largest: npt.NDArray[np.float64] = np.maximum.reduceat(values, offsets[:-1])
        return largest
    sums: npt.NDArray[np.float64] = np.add.reduceat(values, offsets[:-1])
    return sums / np.diff(offsets).reshape(-1, *[1] * (values.ndim - 1))


def _predict_classes(
    task: TaskConfig, encoded: EncodedDataset, outputs: Outputs, uses_sigmoid: bool
) -> dict[str, Sequence[Any]]:
    to_probabilities = sigmoid if uses_sigmoid else softmax
    probabilities = pool_windows(to_probabilities(outputs), encoded, task.long_text)
    # Of single rows by the logits, as large ones all have the probability 1 by sigmoid.
    is_single = len(probabilities) == len(outputs)
    indices = (outputs if is_single else probabilities).argmax(axis=1).tolist()
    return {
        "index": indices,
        "value": [task.labels[index] for index in indices],
        "probabilities": tuples_of(probabilities),
    }


def with_best_thresholds(
    task: TaskConfig, examples: Sequence[Example], encoded: EncodedDataset, outputs: Outputs
) -> TaskConfig:
    """Return a task with the threshold of each label that has the best F1 on some examples.

    The task is unchanged if it has thresholds, or a head that needs none.

    Args:
        task: the task.
        examples: labelled examples.
        encoded: their encoding.
        outputs: see ``predict``.

    Raises:
        DataError: examples have no labels.
    """
    if task.head != "multilabel" or task.thresholds:
        return task
    require_labels(task, examples)
    truth = np.array([example.tags for example in examples], np.bool_)
    probabilities = pool_windows(sigmoid(outputs), encoded, task.long_text)
    columns = zip(truth.T, probabilities.T, strict=True)
    return replace(task, thresholds=tuple(best_label_threshold(*column) for column in columns))


def best_label_threshold(
    truth: npt.NDArray[np.bool_], probabilities: npt.NDArray[np.float64]
) -> float:
    """Return the probability from which a label is predicted with the best F1.

    It is in the middle between two neighbouring probabilities of the examples, so that rounding
    errors change no prediction; of equal F1, the one nearest to 0.5, which is also that of labels
    that no example has.

    Args:
        truth: whether each example has the label, ``[examples]``.
        probabilities: of the label, ``[examples]``.
    """
    if not truth.any():
        return DEFAULT_THRESHOLD
    order = np.argsort(-probabilities, kind="stable")
    ordered = np.append(probabilities[order], 0.0)
    upper, lower = ordered[:-1], ordered[1:]
    middle = (upper + lower) / 2
    found = np.arange(1, len(upper) + 1)
    f1 = 2 * np.cumsum(truth[order]) / (found + truth.sum())
    # Examples of equal probability are predicted together; a middle may be rounded down to one.
    f1[(middle <= lower) | (middle >= 1)] = -1.0
    best = np.flatnonzero(f1 >= f1.max() - 1e-12)
    return float(middle[best][np.abs(middle[best] - DEFAULT_THRESHOLD).argmin()])


def cosines(encoded: EncodedDataset, embeddings: Outputs) -> npt.NDArray[np.float64]:
    """Return the cosine of the first two texts of each example, float64 ``[examples]``."""
    unit = embeddings.astype(np.float64)
    unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    first = encoded.example_offsets[:-1]
    result: npt.NDArray[np.float64] = (unit[first] * unit[first + 1]).sum(axis=1)
    return result


def _predict_choices(
    task: TaskConfig, encoded: EncodedDataset, outputs: Outputs, uses_sigmoid: bool
) -> dict[str, Sequence[Any]]:
    # Scores of passages are returned unchanged.
    unchanged = np.float64 if task.head == "rerank" else softmax
    to_scores: Callable[[Outputs], npt.NDArray[np.float64]] = sigmoid if uses_sigmoid else unchanged
    logits = np.split(outputs, encoded.example_offsets[1:-1])
    indices = [int(each.argmax()) for each in logits]
    return {
        "index": indices,
        "value": [task.labels[index] if task.labels else str(index) for index in indices],
        "probabilities": tuples_of(map(to_scores, logits)),
    }


def _predict_tags(
    task: TaskConfig, examples: Sequence[Example], encoded: EncodedDataset, outputs: Outputs
) -> dict[str, Sequence[Any]]:
    # Each word is labelled once, and windows are in the order of the text.
    at = np.flatnonzero(encoded.word_index >= 0)
    names = np.array(task.labels, dtype=object)[outputs[at].argmax(axis=1)]
    sure = softmax(outputs[at]).max(axis=1)
    ends = np.cumsum([len(example.words) for example in examples])[:-1]
    return {
        "value": tuples_of(np.split(names, ends)),
        "probabilities": tuples_of(np.split(sure, ends)),
    }


def best_spans(
    task: TaskConfig,
    examples: Sequence[Example],
    encoded: EncodedDataset,
    outputs: npt.NDArray[np.float32],
) -> list[tuple[str, float]]:
    """Return the best answer of each question over all its windows.

    Candidates that are in no window are counted in a warning.

    Args:
        task: the task.
        examples: the questions.
        encoded: their rows.
        outputs: fp32 ``[tokens, 2]``, logits of the first and of the last token of an answer.

    Returns:
        Text, and score of no answer minus that of the answer: the sum of its start and end logits,
        -inf if no span is possible.
    """
    offsets = encoded.example_offsets
    found = []
    unplaced = total = 0
    for index, example in enumerate(examples):
        context = example.text_pair or ""
        rows = [encoded.row(row) for row in range(int(offsets[index]), int(offsets[index + 1]))]
        windows = [(outputs[row].astype(np.float64), encoded.char_offsets[row]) for row in rows]
        # The first token stands for "no answer in this window"; so does the example's score for
        # the window where that is least likely.
        null = min(float(logits[0].sum()) for logits, _ in windows)
        if example.candidates:
            spans = _candidates(example, windows)
            total += len(example.candidates)
            unplaced += len(example.candidates) - len(spans)
        else:
            spans = [_best_pieces(*window, task.max_answer_length) for window in windows]
        best, place = max(spans, key=lambda span: span[0], default=(-np.inf, (0, 0)))
        found.append((context[place[0] : place[1]], null - best))
    if unplaced:
        logger.warning(
            "task %s: %s of %s candidates are in no window and cannot be predicted; raise "
            "max_length or stride",
            task.name, f"{unplaced:,}", f"{total:,}",
        )  # fmt: skip
    return found


def _best_pieces(
    logits: npt.NDArray[np.float64], chars: npt.NDArray[np.int32], longest: int
) -> tuple[float, tuple[int, int]]:
    """Return score and characters of the best span of at most ``longest`` tokens."""
    inside = np.flatnonzero(chars[:, 0] >= 0)
    if not len(inside):
        return -np.inf, (0, 0)
    # The passage's tokens are contiguous in a row.
    first, last = inside[0], inside[-1] + 1
    longest = min(longest, last - first)
    starts, ends = logits[first:last, 0], logits[first:last, 1]
    padded = np.concatenate([ends, np.full(longest - 1, -np.inf)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, longest)
    lengths = windows.argmax(axis=1)
    scores = starts + windows[np.arange(len(starts)), lengths]
    start = int(scores.argmax())
    end = start + int(lengths[start])
    span = int(chars[first + start, 0]), int(chars[first + end, 1])
    return float(scores[start]), span


def _candidates(
    example: Example, windows: Sequence[tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]]
) -> list[tuple[float, tuple[int, int]]]:
    """Return score and characters of each candidate of an example that lies in a window.

    Args:
        example: the example.
        windows: logits and characters of the tokens of each of its rows.
    """
    chars = np.concatenate([chars for _, chars in windows])
    found = []
    for candidate in example.candidates:
        span = covered_span(chars, candidate.start, candidate.end)
        places = [(logits, span and pieces_of(chars, *span)) for logits, chars in windows]
        scores = [float(logits[at[0], 0] + logits[at[1], 1]) for logits, at in places if at]
        if scores:
            found.append((max(scores), (candidate.start, candidate.end)))
    return found

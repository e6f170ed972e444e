"""Prediction files: GLUE, SuperGLUE, SQuAD and CoNLL, and JSON Lines for other tasks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson

from megatron_deberta.errors import ConfigError
from megatron_deberta.files import write_atomically
from megatron_deberta.tasks.examples import Example, Prediction, sentences
from megatron_deberta.tasks.metrics import ranks
from megatron_deberta.tasks.task import SCORE_HEADS, TaskConfig, entities, entity_labels

_ANSWER_ID = re.compile("-".join(["(-?[0-9]{1,18})"] * 3))
"""Identifier of an answer of MultiRC."""


def json_lines(
    task: TaskConfig, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> bytes:
    """Return one JSON object per example: its text, the prediction, and its label if it has one.

    Beside these are the other fields of `Prediction` that the task has, which ``compare`` reads.

    Args:
        task: the task.
        examples: of the split.
        predictions: one per example, in the same order.
    """
    pairs = zip(examples, predictions, strict=True)
    return _json_lines(_described(task, *pair) for pair in pairs)


def write_predictions(
    task: TaskConfig,
    split: str,
    examples: Sequence[Example],
    predictions: Sequence[Prediction],
    folder: Path,
) -> list[Path]:
    """Write predictions in the format that the task names.

    Args:
        task: the task.
        split: names the file where the split has no ``leaderboard_file``.
        examples: the examples.
        predictions: their predictions, in the same order.
        folder: the folder of the files, created if it does not exist.

    Returns:
        The files, each complete or unchanged.

    Raises:
        ConfigError: the folder cannot be written.
    """
    name = task.splits[split].leaderboard_file if split in task.splits else ""
    files = _files(task, name or split, examples, predictions)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            write_atomically(folder / path, content)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write predictions: {error}") from error
    return [folder / path for path in files]


def _described(task: TaskConfig, example: Example, prediction: Prediction) -> dict[str, Any]:
    words, choices = example.words, example.choices
    texts: dict[str, Any] = {"text": " ".join(words) if words else example.text}
    if example.text_pair is not None:
        texts["text_pair"] = example.text_pair
    if words:
        texts["words"] = words
    names: Sequence[str] = task.labels
    if choices and task.head != "embed":
        texts["passages" if task.head == "rerank" else "choices"] = choices
        names = task.labels or list(map(str, range(len(choices))))
    found = {"id": prediction.id, **texts, "label": prediction.value}
    if prediction.embedding:
        found = {"id": prediction.id, **texts, "embedding": prediction.embedding}
    if words:
        found["scores"] = prediction.probabilities
        found |= _entities(task, words, prediction)
    elif task.head == "rerank":
        found |= {"scores": prediction.probabilities, "ranks": ranks(prediction.probabilities)}
    # Choices may be fewer than the names of their positions.
    elif scores := dict(zip(names, prediction.probabilities, strict=False)):
        found["scores"] = scores
    # Value and probabilities are the label and the scores.
    others = {"index": -1, "null_score": 0.0, "group": "", "windows": 0, "truncated": False}
    values = {name: getattr(prediction, name) for name in others}
    found |= {name: value for name, value in values.items() if value != others[name]}
    if (gold := _gold(task, example)) is not None:
        found["gold"] = gold
    return found


def _entities(
    task: TaskConfig, words: Sequence[str], prediction: Prediction
) -> dict[str, list[dict[str, Any]]]:
    """Return a sentence's entities and their characters in the text, if the labels are of any."""
    assert isinstance(prediction.value, tuple)
    if entity_labels(task.labels) is None:
        return {}
    starts = list(accumulate((len(word) + 1 for word in words), initial=0))
    found = [
        {"type": kind, "text": " ".join(words[first : last + 1]), "start": starts[first],
         "end": starts[last + 1] - 1}
        for kind, first, last in sorted(
            entities(task.labels, [prediction.value]), key=lambda entity: entity[1]
        )
    ]  # fmt: skip
    return {"entities": found}


def _gold(task: TaskConfig, example: Example) -> Any:
    """Return the label of an example as ``value`` would be; of spans, all answers; None: none."""
    if example.answers is not None:
        return list(dict.fromkeys(answer.text for answer in example.answers))
    if example.tags and task.head == "multilabel":
        return [label for label, has in zip(task.labels, example.tags, strict=True) if has]
    if example.tags:
        return [task.labels[tag] for tag in example.tags]
    if example.relevance:
        return example.relevance
    if example.label is None or task.head in SCORE_HEADS:
        return example.label
    index = int(example.label)
    return task.labels[index] if task.labels else str(index)


def _superglue_label(task: TaskConfig, prediction: Prediction) -> Any:
    if task.head == "choices":
        return prediction.index
    if task.leaderboard_labels:
        return task.leaderboard_labels[prediction.index]
    return prediction.value


def _multirc_passages(predictions: Sequence[Prediction]) -> list[Any]:
    passages: dict[int, dict[int, list[Any]]] = {}
    for prediction in predictions:
        found = _ANSWER_ID.fullmatch(prediction.id)
        if found is None:
            raise ConfigError(
                f"--leaderboard: id {prediction.id!r} does not name passage, question and answer, "
                "as 3-0-1 does; correct the ids of the data"
            )
        passage, question, answer = map(int, found.groups())
        answers = passages.setdefault(passage, {}).setdefault(question, [])
        answers.append({"idx": answer, "label": prediction.index})
    return [
        {
            "idx": passage,
            "passage": {
                "questions": [{"idx": q, "answers": answers} for q, answers in questions.items()]
            },
        }
        for passage, questions in passages.items()
    ]


def _files(
    task: TaskConfig, name: str, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> dict[str, bytes]:
    """Return the content of prediction files by name.

    Args:
        task: its ``leaderboard`` names the format.
        name: of the file; the format's suffix is added.
        examples: the examples.
        predictions: their predictions, in the same order.
    """
    if task.leaderboard == "glue":
        # A table of index and prediction; scores have three decimals.
        values = [f"{p.value:.3f}" if isinstance(p.value, float) else p.value for p in predictions]
        rows = [f"{p.id}\t{value}" for p, value in zip(predictions, values, strict=True)]
        return {name.removesuffix(".tsv") + ".tsv": _lines(["index\tprediction", *rows])}
    if task.leaderboard == "squad":
        # Answers by id, and for SQuAD 2.0 the scores that its script takes as --na-prob
        files = {f"{name}_predictions.json": {p.id: p.value for p in predictions}}
        if task.unanswerable:
            files[f"{name}_null_odds.json"] = {p.id: p.null_score for p in predictions}
        option = orjson.OPT_INDENT_2
        return {path: orjson.dumps(each, option=option) for path, each in files.items()}
    if task.leaderboard == "conll":
        return {name.removesuffix(".conll") + ".conll": _lines(_conll(task, examples, predictions))}
    if task.leaderboard == "superglue":
        # One object per example, or for MultiRC per passage
        if "group_exact" in task.metrics:
            objects = _multirc_passages(predictions)
        else:
            objects = [
                {"idx": _number(each.id), "label": _superglue_label(task, each)}
                for each in predictions
            ]
        return {name.removesuffix(".jsonl") + ".jsonl": _json_lines(objects)}
    return {name.removesuffix(".jsonl") + ".jsonl": json_lines(task, examples, predictions)}


def _conll(
    task: TaskConfig, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> Iterator[str]:
    """Yield lines of word, right label (if known) and prediction, as conlleval reads them."""
    for example, prediction in zip(examples, predictions, strict=True):
        assert isinstance(prediction.value, tuple)
        columns = [example.words, prediction.value]
        if example.tags:
            columns.insert(1, tuple(task.labels[tag] for tag in example.tags))
        rows = tuple(" ".join(row) for row in zip(*columns, strict=True))
        for sentence in sentences(example, rows):
            yield from (*sentence, "")


def _number(identifier: str) -> int | str:
    return int(identifier) if identifier.isascii() and identifier.isdigit() else identifier


def _lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _json_lines(objects: Iterable[Any]) -> bytes:
    return b"".join(orjson.dumps(item) + b"\n" for item in objects)

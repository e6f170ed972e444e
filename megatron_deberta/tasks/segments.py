"""Encoding of segments, segment pairs and choices: one row per example or choice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_deberta.tasks.encoded import IGNORED, EncodedDataset
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.rows import Ids, RowBuilder, encode_each, first_and_second_lengths
from megatron_deberta.tasks.task import TaskConfig
from megatron_deberta.tokenizer import Tokenizer


def encode_segments(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer, length: int
) -> EncodedDataset:
    """Encode examples of one or two segments with a class or a score.

    Args:
        task: the task.
        examples: to encode.
        tokenizer: the model's tokenizer.
        length: maximum number of tokens per row.
    """
    first = encode_each(tokenizer, [example.text for example in examples])
    second = encode_each(tokenizer, [example.text_pair or "" for example in examples])
    rows = RowBuilder(tokenizer)
    for index, example in enumerate(examples):
        pair = second[index] if example.text_pair is not None else None
        _add_pair(rows, index, first[index], pair, length, task.truncate)
    kind: type[np.generic] = np.float32 if task.head == "regression" else np.int64
    missing = np.nan if task.head == "regression" else IGNORED
    labels = np.array([missing if e.label is None else e.label for e in examples], kind)
    return EncodedDataset(labels=labels, **rows.arrays())


def encode_choices(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer, length: int
) -> EncodedDataset:
    """Encode one row per choice: the example's text, if it has one, then the choice.

    Args:
        task: the task.
        examples: to encode.
        tokenizer: the model's tokenizer.
        length: maximum number of tokens per row.
    """
    first = encode_each(tokenizer, [example.text for example in examples])
    choices = iter(encode_each(tokenizer, [text for e in examples for text in e.choices]))
    rows = RowBuilder(tokenizer)
    for index, example in enumerate(examples):
        for _ in example.choices:
            # Without a passage the choice is the only segment.
            choice = next(choices)
            if example.text:
                _add_pair(rows, index, first[index], choice, length, task.truncate)
            else:
                _add_pair(rows, index, choice, None, length, task.truncate)
    labels = np.array([IGNORED if e.label is None else e.label for e in examples], np.int64)
    return EncodedDataset(labels=labels, **rows.arrays())


def _add_pair(
    rows: RowBuilder, example: int, first: Ids, second: Ids | None, length: int, truncate: str
) -> None:
    if second is None:
        rows.add(example, first[: length - 2])
        return
    kept = first_and_second_lengths(len(first), len(second), length - 3, truncate)
    rows.add(example, first[: kept[0]], second[: kept[1]])

"""Encoding of questions and passages, in windows where a passage is too long for one row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_deberta.errors import DataError
from megatron_deberta.tasks.encoded import EncodedDataset
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.rows import Ids, RowBuilder, encode_each
from megatron_deberta.tasks.spans import covered_span, pieces_of, whole_characters
from megatron_deberta.tasks.task import TaskConfig
from megatron_deberta.tokenizer import Tokenizer

_LEAST_PASSAGE = 16
"""Tokens of the passage that a row has at least; longer questions are cut."""


def encode_spans(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer, length: int
) -> EncodedDataset:
    """Encode ``[CLS] question [SEP] window [SEP]`` rows; windows share ``task.stride`` tokens.

    The label of a row is the first answer that lies wholly in its window.

    Args:
        task: the task.
        examples: to encode.
        tokenizer: the model's tokenizer.
        length: maximum number of tokens per row.

    Raises:
        DataError: ``length`` leaves no room for a passage.
    """
    if length < 2 * _LEAST_PASSAGE:
        raise DataError(f"max_length={length}: spans need at least {2 * _LEAST_PASSAGE} tokens")
    questions = _encode_questions(task, examples, tokenizer)
    contexts = list(dict.fromkeys(example.text_pair or "" for example in examples))
    passages = {
        context: (ids, whole_characters(context, offsets))
        for context, (ids, offsets) in zip(
            contexts, tokenizer.encode_with_offsets(contexts), strict=True
        )
    }
    rows = RowBuilder(tokenizer)
    chars: list[npt.NDArray[np.int32]] = []
    labels = []
    for index, example in enumerate(examples):
        question = questions[index][: length - 3 - _LEAST_PASSAGE]
        ids, offsets = passages[example.text_pair or ""]
        answers = [covered_span(offsets, a.start, a.end) for a in example.answers or ()]
        for begin, end in windows(len(ids), length - 3 - len(question), task.stride):
            size = rows.add(index, question, ids[begin:end])
            row = np.full((size, 2), -1, np.int32)
            row[len(question) + 2 : size - 1] = offsets[begin:end]
            chars.append(row)
            labels.append(_label(answers, row))
    arrays = {**rows.arrays(), "char_offsets": np.concatenate(chars)}
    return EncodedDataset(labels=np.array(labels, np.int64), **arrays)


def windows(size: int, width: int, stride: int) -> list[tuple[int, int]]:
    """Split tokens into windows that overlap.

    The stride is at most half a window, so that windows advance whatever the question's length.

    Args:
        size: number of tokens.
        width: tokens per window.
        stride: tokens that neighbouring windows share.

    Returns:
        First token and one past the last of each window.
    """
    step = width - min(stride, width // 2)
    begins = [0]
    while begins[-1] + width < size:
        begins.append(begins[-1] + step)
    return [(begin, min(begin + width, size)) for begin in begins]


def _label(
    answers: Sequence[tuple[int, int] | None], chars: npt.NDArray[np.int32]
) -> tuple[int, int]:
    for answer in answers:
        if answer is not None and (pieces := pieces_of(chars, *answer)):
            return pieces
    return 0, 0


def unplaced_answers(examples: Sequence[Example], encoded: EncodedDataset) -> list[str]:
    """Return the ids of answered questions whose answers are in no window, so without a label."""
    has_label = np.zeros(len(examples), np.bool_)
    np.logical_or.at(has_label, encoded.example_index, encoded.labels[:, 0] > 0)
    return [
        example.id
        for example, has in zip(examples, has_label.tolist(), strict=True)
        if example.answers and not has
    ]


def _encode_questions(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer
) -> list[Ids]:
    """Encode questions; ``task.mask_text`` in them becomes [MASK]."""
    if not task.mask_text:
        return encode_each(tokenizer, [example.text for example in examples])
    parts = [example.text.split(task.mask_text) for example in examples]
    encoded = iter(encode_each(tokenizer, [part.strip() for found in parts for part in found]))
    mask = np.array([tokenizer.mask_id], np.int32)
    return [
        np.concatenate([ids for _ in found for ids in (mask, next(encoded))][1:]) for found in parts
    ]

"""Encoding of words with labels: one label per word, on its first piece."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_deberta.tasks.encoded import IGNORED, EncodedDataset
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.rows import Ids, RowBuilder, encode_each
from megatron_deberta.tasks.task import TaskConfig
from megatron_deberta.tokenizer import Tokenizer


def encode_words(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer, length: int
) -> EncodedDataset:
    """Encode sentences; each word is labelled at its first piece, in exactly one window.

    Words without a piece (such as a lone variation selector) become [UNK]. A sentence that is too
    long is split into windows that overlap by ``task.stride`` tokens; a word is labelled in the
    window where the nearer edge of the window is farther away.

    Args:
        task: the task.
        examples: to encode.
        tokenizer: the model's tokenizer.
        length: maximum number of tokens per row.
    """
    pieces = _pieces_of_words(examples, tokenizer)
    rows = RowBuilder(tokenizer)
    word_index: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    labels = []
    for index, example in enumerate(examples):
        words = pieces[index]
        starts = np.concatenate([[0], np.cumsum([len(word) for word in words])])
        ids = np.concatenate([np.empty(0, np.int32), *words])
        tags = np.array(example.tags, np.int32)
        for begin, end, scored in _windows(len(ids), length - 2, task.stride):
            size = rows.add(index, ids[begin:end])
            at = np.full(size, -1, np.int32)
            first = (starts[:-1] >= scored[0]) & (starts[:-1] < scored[1])
            numbers = np.flatnonzero(first)
            at[1 + starts[numbers] - begin] = numbers
            tag = np.full(size, IGNORED, np.int32)
            if len(tags):
                tag[at >= 0] = tags[at[at >= 0]]
            word_index.append(at)
            labels.append(tag)
    arrays = {**rows.arrays(), "word_index": np.concatenate(word_index)}
    return EncodedDataset(labels=np.concatenate(labels), **arrays)


def _windows(size: int, width: int, stride: int) -> list[tuple[int, int, tuple[int, int]]]:
    """Return begin and end of each window, and the part of the tokens that is scored in it."""
    if size <= width:
        return [(0, size, (0, size))]
    overlap = min(stride, width // 2)
    begins = [*range(0, size - width, width - overlap), size - width]
    # The border of two windows is the middle of what they share.
    borders = [0, *((b + a + width) // 2 for a, b in zip(begins, begins[1:], strict=False)), size]
    return [(begin, begin + width, (borders[i], borders[i + 1])) for i, begin in enumerate(begins)]


def _pieces_of_words(examples: Sequence[Example], tokenizer: Tokenizer) -> list[list[Ids]]:
    """Encode each word as within a sentence."""
    space = "" if _starts_words(tokenizer) else " "
    texts = [
        (space if position else "") + word
        for example in examples
        for position, word in enumerate(example.words)
    ]
    unknown = np.array([tokenizer.unk_id], np.int32)
    encoded = iter(encode_each(tokenizer, texts))
    return [
        [found if len(found := next(encoded)) else unknown for _ in example.words]
        for example in examples
    ]


def _starts_words(tokenizer: Tokenizer) -> bool:
    """Tell whether a text's first piece begins a word without a space before it.

    SentencePiece and WordPiece do so; byte-level BPE needs the space.
    """
    return bool(tokenizer.word_starts()[tokenizer.encode("a")[0]])

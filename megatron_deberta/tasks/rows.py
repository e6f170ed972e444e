"""Rows ``[CLS] first [SEP]`` and ``[CLS] first [SEP] second [SEP]``, collected into flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]


class RowBuilder:
    """Collects rows of tokens.

    Args:
        tokenizer: for the ids of [CLS] and [SEP].
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """See the class."""
        self._cls = np.array([tokenizer.cls_id], np.int32)
        self._sep = np.array([tokenizer.sep_id], np.int32)
        self._ids: list[Ids] = []
        self._types: list[npt.NDArray[np.uint8]] = []
        self._lengths: list[int] = []
        self._examples: list[int] = []
        self.num_tokens = 0

    def add(self, example: int, first: Ids, second: Ids | None = None) -> int:
        """Add a row.

        Args:
            example: index of its example.
            first: tokens of the first segment.
            second: tokens of the second segment; None: there is none.

        Returns:
            The row's number of tokens.
        """
        parts = [self._cls, first, self._sep]
        pair_tokens = 0
        if second is not None:
            parts += [second, self._sep]
            pair_tokens = len(second) + 1
        length = len(first) + 2 + pair_tokens
        types = np.zeros(length, np.uint8)
        types[length - pair_tokens :] = 1
        self._ids += parts
        self._types.append(types)
        self._lengths.append(length)
        self._examples.append(example)
        self.num_tokens += length
        return length

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of ``EncodedDataset`` but labels, offsets and word indices."""
        return {
            "input_ids": np.concatenate(self._ids),
            "token_type_ids": np.concatenate(self._types),
            "row_offsets": np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)]),
            "example_index": np.array(self._examples, np.int64),
            "char_offsets": np.empty((0, 2), np.int32),
            "word_index": np.empty(0, np.int32),
        }


def first_and_second_lengths(first: int, second: int, limit: int, truncate: str) -> tuple[int, int]:
    """Return how many tokens of two segments are kept, ``limit`` at most in total.

    Args:
        first: tokens of the first segment.
        second: tokens of the second segment.
        limit: tokens for both.
        truncate: the segment that is cut: ``first``, ``second``, or token by token the ``longest``.
            If one alone does not suffice, the other one is cut as well.
    """
    if first + second <= limit:
        return first, second
    if truncate == "first":
        second = min(second, limit)
        return limit - second, second
    if truncate == "second":
        first = min(first, limit)
        return first, limit - first
    second = min(second, max(limit - first, limit // 2))
    return min(first, limit - second), second


def encode_each(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Ids]:
    """Encode texts; equal texts are encoded once."""
    distinct = list(dict.fromkeys(texts))
    ids, lengths = tokenizer.encode_texts(distinct)
    parts = dict(zip(distinct, np.split(ids, np.cumsum(lengths)[:-1]), strict=True))
    return [parts[text] for text in texts]

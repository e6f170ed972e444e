"""Windows of a text, of which some tokens are scored, for perplexity and log-likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_deberta.data import Booleans, Integers
from megatron_deberta.data.batch import IGNORED_LABEL, Batch
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.train.row_scores import batches_by_size


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Rows that are windows of a sequence of tokens, framed by [CLS] and [SEP].

    Attributes:
        tokens: int64 ``[T]``.
        begins: int64 ``[W]``, first token of each window.
        ends: int64 ``[W]``, one past the last.
        firsts: int64 ``[W]``, first scored token.
        stops: int64 ``[W]``, one past the last.
        vocabulary: special ids.
        mask_every: 0: tokens are predicted from those before them. K > 0: they are masked and
            predicted from the whole window; of its scored tokens, row k of its K rows masks those
            whose number is k modulo K.
    """

    tokens: Integers
    begins: Integers
    ends: Integers
    firsts: Integers
    stops: Integers
    vocabulary: Vocabulary
    mask_every: int = 0

    @staticmethod
    def of_sentences(sentences: Sequence[Integers], vocabulary: Vocabulary) -> WindowRows:
        """Return a window for each sentence, all of it scored from left to right."""
        sizes = np.array([len(ids) for ids in sentences], np.int64)
        ends = sizes.cumsum()
        tokens = np.concatenate([np.empty(0, np.int64), *sentences])
        return WindowRows(tokens, ends - sizes, ends, ends - sizes, ends, vocabulary)

    @staticmethod
    def of_text(
        tokens: Integers, vocabulary: Vocabulary, length: int, stride: int, mask_every: int = 0
    ) -> WindowRows:
        """Return overlapping windows that score each token once.

        The tokens of a window that are not scored are context: before the scored ones if they are
        predicted from left to right, else on both sides.

        Args:
            tokens: int64 ``[T]``.
            vocabulary: special ids.
            length: tokens per row, [CLS] and [SEP] included.
            stride: scored tokens per window; the first and the last may have more.
            mask_every: as the attribute.
        """
        content = min(length - 2, len(tokens))
        stride = min(stride, content)
        margin = content - stride
        before = margin // 2 if mask_every else margin
        begins = np.arange(0, max(len(tokens) - content, 0) + stride, stride)
        begins = np.minimum(begins, len(tokens) - content)
        firsts = np.concatenate([[0], begins[:-1] + before + stride])
        stops = np.append(firsts[1:], len(tokens))
        return WindowRows(tokens, begins, begins + content, firsts, stops, vocabulary, mask_every)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.begins) * max(self.mask_every, 1)

    def batches(self, tokens: int, dp_size: int) -> list[Integers]:
        """Divide the rows into batches of equal length, as `ScoredRows.batches`."""
        sizes = (self.ends - self.begins + 2).repeat(max(self.mask_every, 1))
        return batches_by_size(sizes, tokens, dp_size)

    def batch(self, rows: Integers, multiple: int = 1) -> Batch:
        """Build the batch of some rows of equal length, as `ScoredRows.batch`."""
        words, numbers = self.vocabulary, rows if rows.size else np.zeros(1, np.int64)
        windows = numbers // max(self.mask_every, 1)
        begins = self.begins[windows]
        size = int(self.ends[windows[0]] - begins[0])
        texts = self.tokens[begins[:, None] + np.arange(size)]
        chosen = self._chosen(numbers, size)
        ids = np.full((len(texts), -(-(size + 2) // multiple) * multiple), words.pad_id, np.int64)
        ids[:, 0], ids[:, size + 1] = words.cls_id, words.sep_id
        ids[:, 1 : size + 1] = np.where(chosen & bool(self.mask_every), words.mask_id, texts)
        counts = chosen.sum(1)
        row, place = np.nonzero(chosen)
        slot = np.arange(row.size) - (counts.cumsum() - counts)[row]
        positions = np.full((len(texts), max(int(counts.max()), 1)), -1, np.int64)
        labels = np.full(positions.shape, IGNORED_LABEL, np.int64)
        # The state before a token predicts it, or that of the masked token.
        positions[row, slot] = place + bool(self.mask_every)
        labels[row, slot] = texts[row, place]
        is_token = np.broadcast_to(np.arange(ids.shape[1]) < size + 2, ids.shape).copy()
        inputs = ModelInputs(
            torch.from_numpy(ids), torch.from_numpy(is_token), causal=not self.mask_every
        )
        return Batch(inputs, *(torch.from_numpy(x) for x in (positions, labels, numbers)))

    def _chosen(self, numbers: Integers, size: int) -> Booleans:
        """Return which tokens ``[rows, size]`` of rows are predicted."""
        windows = numbers // max(self.mask_every, 1)
        first = (self.firsts - self.begins)[windows, None]
        stop = (self.stops - self.begins)[windows, None]
        columns = np.arange(size)
        scored: Booleans = (columns >= first) & (columns < stop)
        if self.mask_every:
            scored &= (columns - first) % self.mask_every == (numbers % self.mask_every)[:, None]
        return scored

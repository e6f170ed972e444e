"""Log-likelihoods of sentences and texts, masked or from left to right, on any number of ranks.

Sources: Salazar et al. 2020, arXiv:1910.14659, equation 1 (``original``); Kauf and Ivanova 2023,
arXiv:2305.10588 (``within_word_l2r``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from megatron_deberta.data.arrays import Booleans, Integers
from megatron_deberta.data.batch import IGNORED_LABEL, Batch
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.distributed.control import sum_over_batch_ranks
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.evaluate.validation import evaluation_mode, never
from megatron_deberta.model.inputs import ModelInputs


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


Metric = Literal["original", "within_word_l2r"]
"""``original`` masks the scored token only; ``within_word_l2r`` also the later tokens of its word,
which otherwise reveal it and favour words of many pieces."""


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """One row per token of each sentence: the sentence with that token masked.

    Attributes:
        sentences: int64 ``[tokens]`` of each sentence, without [CLS] and [SEP].
        vocabulary: ids and word starts of the tokenizer.
        metric: what is masked.
        sentence: int64 ``[rows]``, the sentence of each row.
        place: int64 ``[rows]``, the scored token in its sentence.
    """

    sentences: Sequence[Integers]
    vocabulary: Vocabulary
    metric: Metric
    sentence: Integers
    place: Integers

    @staticmethod
    def of(
        sentences: Sequence[Integers], vocabulary: Vocabulary, metric: Metric = "original"
    ) -> MaskedRows:
        """Return the rows of sentences, sentence after sentence.

        Args:
            sentences: int64 ``[tokens]`` of each sentence, without [CLS] and [SEP].
            vocabulary: ids and word starts of the tokenizer.
            metric: what is masked.
        """
        sizes = np.array([len(ids) for ids in sentences], np.int64)
        places = [np.arange(size) for size in sizes]
        sentence = np.repeat(np.arange(len(sizes)), sizes)
        place = np.concatenate([np.empty(0, np.int64), *places])
        return MaskedRows(sentences, vocabulary, metric, sentence, place)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.place)

    def batches(self, tokens: int, dp_size: int) -> list[Integers]:
        """Divide the rows into batches of equal length, as `ScoredRows.batches`."""
        sizes = np.array([len(ids) for ids in self.sentences], np.int64)[self.sentence]
        return batches_by_size(sizes + 2, tokens, dp_size)

    def batch(self, rows: Integers, multiple: int = 1) -> Batch:
        """Build the batch of some rows of equal length; of no rows, one without labels.

        Args:
            rows: row numbers.
            multiple: N is a multiple of this.
        """
        words, numbers = self.vocabulary, rows if rows.size else np.zeros(1, np.int64)
        texts = np.stack([self.sentences[number] for number in self.sentence[numbers]])
        places = self.place[numbers]
        labels = texts[np.arange(len(texts)), places]
        masked = self._masked(texts, places)
        length = texts.shape[1] + 2
        ids = np.full((len(texts), -(-length // multiple) * multiple), words.pad_id, np.int64)
        ids[:, 0], ids[:, length - 1] = words.cls_id, words.sep_id
        ids[:, 1 : length - 1] = np.where(masked, words.mask_id, texts)
        mask = np.broadcast_to(np.arange(ids.shape[1]) < length, ids.shape).copy()
        return Batch(
            ModelInputs(torch.from_numpy(ids), torch.from_numpy(mask)),
            masked_positions=torch.from_numpy(places[:, None] + 1),
            labels=torch.from_numpy(labels[:, None].astype(np.int64)),
            sample_index=torch.from_numpy(numbers),
        )

    def _masked(self, texts: Integers, places: Integers) -> Booleans:
        """Return which tokens ``[rows, tokens]`` are masked."""
        columns = np.arange(texts.shape[1])
        is_scored: Booleans = columns == places[:, None]
        if self.metric == "original":
            return is_scored
        word = np.cumsum(self.vocabulary.word_starts[texts], axis=1)
        same: Booleans = word == word[np.arange(len(texts)), places][:, None]
        return same & (columns >= places[:, None])


class ScoredRows(Protocol):
    """Rows with tokens to predict."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""

    def batches(self, tokens: int, dp_size: int) -> list[Integers]:
        """Divide the rows into batches of equal length.

        Args:
            tokens: maximum tokens of a batch, unless one row has more.
            dp_size: the number of batches is a multiple of this; extra ones are empty.

        Returns:
            Row numbers of each batch.
        """

    def batch(self, rows: Integers, multiple: int = 1) -> Batch:
        """Build the batch of some rows of equal length; of no rows, one whose score is not used.

        Args:
            rows: row numbers, which are the batch's ``sample_index``.
            multiple: N is a multiple of this.
        """


def batches_by_size(sizes: Integers, tokens: int, dp_size: int) -> list[Integers]:
    """Divide rows into batches of equal length, as `ScoredRows.batches`.

    Args:
        sizes: int64 ``[rows]``, tokens of each row.
        tokens: maximum tokens of a batch, unless one row has more.
        dp_size: the number of batches is a multiple of this; extra ones are empty.
    """
    found: list[Integers] = []
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        most = max(1, tokens // int(size))
        found += [rows[first : first + most] for first in range(0, len(rows), most)]
    found += [np.empty(0, np.int64)] * (-len(found) % dp_size)
    return found


def score_rows(
    module: nn.Module,
    rows: ScoredRows,
    groups: ProcessGroups,
    tokens_per_batch: int,
    *,
    multiple: int = 1,
    must_stop: Callable[[], bool] = never,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> npt.NDArray[np.float64] | None:
    """Sum the log-probabilities of each row's targets. Collective over all ranks.

    Only targets are decoded. Data-parallel ranks divide the rows; the batches do not depend on the
    layout.

    Args:
        module: `objectives.MaskedLanguageModel`.
        rows: the rows.
        groups: the rank grid.
        tokens_per_batch: maximum tokens of a forward pass.
        multiple: row lengths are padded to a multiple of this (sequence parallelism).
        must_stop: called before each batch, with the same result on every rank.
        advance: called with the batches done and their number.

    Returns:
        ``[rows]`` in nats; None: told to stop.
    """
    scores = torch.zeros(rows.num_rows, dtype=torch.float64, device=groups.device)
    batches = rows.batches(tokens_per_batch, groups.dp_size)
    own = batches[groups.dp_rank :: groups.dp_size]
    with evaluation_mode(module):
        for done, numbers in enumerate(own, start=1):
            if must_stop():
                return None
            batch = rows.batch(numbers, multiple).to(groups.device)
            (tokens,) = module(batch, None, reduction="none").losses.values()
            losses = tokens.loss.view(batch.labels.shape)
            if numbers.size:
                scores[batch.sample_index] = -losses.double().sum(1)
            advance(done, len(own))
    values: npt.NDArray[np.float64] = sum_over_batch_ranks(scores, groups).cpu().numpy()
    return values


def score_sentences(
    module: nn.Module,
    rows: MaskedRows | WindowRows,
    groups: ProcessGroups,
    tokens_per_batch: int,
    *,
    multiple: int = 1,
    must_stop: Callable[[], bool] = never,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> npt.NDArray[np.float64] | None:
    """Sum the log-probabilities of each sentence's tokens. Collective over all ranks.

    Args:
        module: as in `score_rows`, like the following.
        rows: the sentences, masked or of an autoregressive model.
        groups: the rank grid.
        tokens_per_batch: maximum tokens of a forward pass.
        multiple: row lengths are padded to a multiple of this.
        must_stop: called before each batch.
        advance: called with the batches done and their number.

    Returns:
        ``[sentences]`` in nats; None: told to stop.
    """
    values = score_rows(
        module,
        rows,
        groups,
        tokens_per_batch,
        multiple=multiple,
        must_stop=must_stop,
        advance=advance,
    )
    if values is None or isinstance(rows, WindowRows):
        return values
    sums: npt.NDArray[np.float64] = np.zeros(len(rows.sentences))
    np.add.at(sums, rows.sentence, values)
    return sums

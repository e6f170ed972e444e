"""Log-likelihoods of sentences and texts, masked or from left to right, on any number of ranks.

Sources: Salazar et al. 2020, arXiv:1910.14659, equation 1 (``original``); Kauf and Ivanova 2023,
arXiv:2305.10588 (``within_word_l2r``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from megatron_deberta.data import Booleans, Integers
from megatron_deberta.data.batch import Batch
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.distributed.control import sum_over_batch_ranks
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.evaluate.validation import evaluation_mode, never
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL

Metric = Literal["original", "within_word_l2r"]
"""``original`` masks the scored token only; ``within_word_l2r`` also the later tokens of its word,
which otherwise reveal it and favour words of many pieces."""


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Rows that are windows of texts, of which some tokens are scored, framed by [CLS] and [SEP].

    Attributes:
        tokens: int64 ``[T]``, of all texts.
        texts: int64 ``[W]``, the text of each window.
        num_texts: number of texts.
        begins: int64 ``[W]``, first token of each window.
        ends: int64 ``[W]``, one past the last.
        firsts: int64 ``[W]``, first scored token.
        stops: int64 ``[W]``, one past the last.
        vocabulary: ids and word starts of the tokenizer.
        mask_every: 0: tokens are predicted from those before them. K > 0: they are masked and
            predicted from the whole window; of its scored tokens, row k of its K rows masks those
            whose number is k modulo K.
        masked_stops: int64 ``[W]``: masked are all tokens from the first scored one to before this
            one; None: the scored ones.
    """

    tokens: Integers
    texts: Integers
    num_texts: int
    begins: Integers
    ends: Integers
    firsts: Integers
    stops: Integers
    vocabulary: Vocabulary
    mask_every: int = 0
    masked_stops: Integers | None = None

    @staticmethod
    def of_sentences(
        sentences: Sequence[Integers], vocabulary: Vocabulary, metric: Metric | None = None
    ) -> WindowRows:
        """Return a window for each sentence, or for each of its tokens the sentence with it masked.

        Args:
            sentences: int64 ``[tokens]`` of each sentence, without [CLS] and [SEP].
            vocabulary: ids and word starts of the tokenizer.
            metric: what is masked; None: nothing, all of a sentence is scored from left to right.
        """
        sizes = np.array([len(ids) for ids in sentences], np.int64)
        ends = sizes.cumsum()
        begins, tokens = ends - sizes, np.concatenate([np.empty(0, np.int64), *sentences])
        if metric is None:
            texts = np.arange(len(sentences))
            return WindowRows(tokens, texts, len(sentences), begins, ends, begins, ends, vocabulary)
        texts = np.repeat(np.arange(len(sentences)), sizes)
        begins, ends, places = begins[texts], ends[texts], np.arange(len(tokens))
        masked_stops = None
        if metric == "within_word_l2r":
            # The next token that begins a word, of the same sentence.
            starts = np.where(vocabulary.word_starts[tokens], places, len(tokens))
            following = np.append(np.minimum.accumulate(starts[::-1])[::-1][1:], len(tokens))
            masked_stops = np.minimum(following, ends)
        return WindowRows(
            tokens, texts, len(sentences), begins, ends, places, places + 1, vocabulary, 1,
            masked_stops,
        )  # fmt: skip

    @staticmethod
    def of_text(
        tokens: Integers, vocabulary: Vocabulary, length: int, stride: int, mask_every: int = 0
    ) -> WindowRows:
        """Return overlapping windows that score each token once.

        The tokens of a window that are not scored are context: before the scored ones if they are
        predicted from left to right, else on both sides.

        Args:
            tokens: int64 ``[T]``.
            vocabulary: ids and word starts of the tokenizer.
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
        texts = np.zeros(len(begins), np.int64)
        return WindowRows(
            tokens, texts, 1, begins, begins + content, firsts, stops, vocabulary, mask_every
        )

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.begins) * max(self.mask_every, 1)

    def batches(self, tokens: int, dp_size: int) -> list[Integers]:
        """Divide the rows into batches of equal length.

        Args:
            tokens: maximum tokens of a batch, unless one row has more.
            dp_size: the number of batches is a multiple of this; extra ones are empty.

        Returns:
            Row numbers of each batch.
        """
        sizes = (self.ends - self.begins + 2).repeat(max(self.mask_every, 1))
        found: list[Integers] = []
        for size in np.unique(sizes):
            rows = np.flatnonzero(sizes == size)
            most = max(1, tokens // int(size))
            found += [rows[first : first + most] for first in range(0, len(rows), most)]
        found += [np.empty(0, np.int64)] * (-len(found) % dp_size)
        return found

    def batch(self, rows: Integers, multiple: int = 1) -> Batch:
        """Build the batch of some rows of equal length; of no rows, one whose score is not used.

        Args:
            rows: row numbers, which are the batch's ``sample_index``.
            multiple: N is a multiple of this.
        """
        words, numbers = self.vocabulary, rows if rows.size else np.zeros(1, np.int64)
        windows = numbers // max(self.mask_every, 1)
        begins = self.begins[windows]
        size = int(self.ends[windows[0]] - begins[0])
        tokens = self.tokens[begins[:, None] + np.arange(size)]
        scored, masked = self._places(numbers, windows, size)
        ids = np.full((len(tokens), -(-(size + 2) // multiple) * multiple), words.pad_id, np.int64)
        ids[:, 0], ids[:, size + 1] = words.cls_id, words.sep_id
        ids[:, 1 : size + 1] = np.where(masked, words.mask_id, tokens)
        counts = scored.sum(1)
        row, place = np.nonzero(scored)
        slot = np.arange(row.size) - (counts.cumsum() - counts)[row]
        positions = np.full((len(tokens), max(int(counts.max()), 1)), -1, np.int64)
        labels = np.full(positions.shape, IGNORED_LABEL, np.int64)
        # The state before a token predicts it, or that of the masked token.
        positions[row, slot] = place + bool(self.mask_every)
        labels[row, slot] = tokens[row, place]
        is_token = np.broadcast_to(np.arange(ids.shape[1]) < size + 2, ids.shape).copy()
        inputs = ModelInputs(
            torch.from_numpy(ids), torch.from_numpy(is_token), causal=not self.mask_every
        )
        places, targets, samples = map(torch.from_numpy, (positions, labels, numbers))
        return Batch(inputs, places, targets, samples)

    def _places(
        self, numbers: Integers, windows: Integers, size: int
    ) -> tuple[Booleans, Booleans | Literal[False]]:
        """Return which tokens ``[rows, size]`` of rows are scored, and which are masked."""
        columns = self.begins[windows, None] + np.arange(size)
        firsts = self.firsts[windows, None]
        scored: Booleans = (columns >= firsts) & (columns < self.stops[windows, None])
        if not self.mask_every:
            return scored, False
        scored &= (columns - firsts) % self.mask_every == (numbers % self.mask_every)[:, None]
        if self.masked_stops is None:
            return scored, scored
        return scored, (columns >= firsts) & (columns < self.masked_stops[windows, None])


def score_rows(
    module: nn.Module,
    rows: WindowRows,
    groups: ProcessGroups,
    tokens_per_batch: int,
    *,
    multiple: int = 1,
    should_abort: Callable[[], bool] = never,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> npt.NDArray[np.float64] | None:
    """Sum the log-probabilities of each text's scored tokens. Collective over all ranks.

    Only these are decoded. Data-parallel ranks divide the rows; the batches do not depend on the
    layout.

    Args:
        module: `objectives.MaskedLanguageModel`.
        rows: the rows.
        groups: the rank grid.
        tokens_per_batch: maximum tokens of a forward pass.
        multiple: row lengths are padded to a multiple of this (sequence parallelism).
        should_abort: called before each batch, with the same result on every rank.
        advance: called with the batches done and their number.

    Returns:
        ``[texts]`` in nats; None: told to stop.
    """
    scores = torch.zeros(rows.num_rows, dtype=torch.float64, device=groups.device)
    batches = rows.batches(tokens_per_batch, groups.dp_size)
    own = batches[groups.dp_rank :: groups.dp_size]
    with evaluation_mode(module):
        for done, numbers in enumerate(own, start=1):
            if should_abort():
                return None
            batch = rows.batch(numbers, multiple).to(groups.device)
            (tokens,) = module(batch, None, reduction="none").losses.values()
            losses = tokens.loss.view(batch.labels.shape)
            if numbers.size:
                scores[batch.sample_index] = -losses.double().sum(1)
            advance(done, len(own))
    values: npt.NDArray[np.float64] = sum_over_batch_ranks(scores, groups).cpu().numpy()
    texts = rows.texts.repeat(max(rows.mask_every, 1))
    sums: npt.NDArray[np.float64] = np.zeros(rows.num_texts)
    np.add.at(sums, texts, values)
    return sums

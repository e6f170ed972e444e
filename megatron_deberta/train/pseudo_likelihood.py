"""Pseudo-log-likelihood of sentences under a masked language model.

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
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.train.evaluate import never
from megatron_deberta.train.row_scores import batches_by_size, score_rows
from megatron_deberta.train.windows import WindowRows

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

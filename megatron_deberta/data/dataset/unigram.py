"""Unigram baseline: the loss of a model that predicts by token frequency alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from megatron_deberta.data import Integers
from megatron_deberta.data.batch import Batch
from megatron_deberta.data.dataset.corpus import Corpus
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.data.shards.statistics import count_shards
from megatron_deberta.errors import DataError

_CHUNK_TOKENS = 1 << 22


def unigram_log_probabilities(
    corpora: Sequence[Corpus],
    weights: Sequence[float],
    vocab_size: int,
    max_tokens: int = 200_000_000,
) -> npt.NDArray[np.float64]:
    """Estimate log p(token) from training documents, with one added to every count.

    Args:
        corpora: training documents, one corpus per component of the blend.
        weights: the components' shares.
        vocab_size: V.
        max_tokens: approximate maximum of tokens read from the front of each corpus.

    Returns:
        [V] float64 natural logarithms.

    Raises:
        DataError: a shard holds an id outside the vocabulary.
    """
    counted = [_counts(corpus, vocab_size, max_tokens) for corpus in corpora]
    total = sum(counts.sum() for counts in counted)
    shares = np.asarray(weights) / np.sum(weights)
    counts = np.ones(vocab_size)
    for share, part in zip(shares, counted, strict=True):
        counts += part * (share * total / part.sum())
    log_probabilities: npt.NDArray[np.float64] = np.log(counts / counts.sum())
    return log_probabilities


def shard_log_probabilities(
    shards: Sequence[IndexedDataset], num_tokens: int, max_tokens: int = 200_000_000
) -> npt.NDArray[np.float64]:
    """Estimate log p(token) from all documents of some shards, with one added to every count.

    Args:
        shards: at least one.
        num_tokens: ids of the tokenizer, V.
        max_tokens: approximate maximum of tokens read, in evenly spread chunks.

    Returns:
        [V] float64 natural logarithms.

    Raises:
        DataError: the shards hold an id outside the vocabulary.
    """
    found = count_shards(shards, max_tokens).token_counts
    if found.size > num_tokens:
        raise DataError(
            f"{shards[0].prefix}: token id {found.size - 1}, but the tokenizer has {num_tokens} "
            "ids; give shards of the model's tokenizer"
        )
    counts = np.ones(num_tokens)
    counts[: found.size] += found
    log_probabilities: npt.NDArray[np.float64] = np.log(counts / counts.sum())
    return log_probabilities


def unigram_cross_entropy(
    log_probabilities: npt.NDArray[np.float64], batches: Iterable[Batch]
) -> tuple[float, int]:
    """Score the unigram model on the masked targets of batches.

    Args:
        log_probabilities: [V] from ``unigram_log_probabilities``.
        batches: CPU batches, e.g. a ``ValidationLoader``. With several ranks, add both results.

    Returns:
        Sum over targets of -log p in nats, and the number of targets.
    """
    loss, targets = 0.0, 0
    for batch in batches:
        labels = batch.labels[batch.masked_positions >= 0].numpy()
        loss -= float(log_probabilities[labels].sum())
        targets += labels.size
    return loss, targets


def _counts(corpus: Corpus, vocab_size: int, max_tokens: int) -> Integers:
    counts = np.zeros(vocab_size, np.int64)
    # Documents have at least one token each, so these suffice.
    ends = np.cumsum(corpus.lengths[:max_tokens], dtype=np.int64)
    ends = ends[: int(np.searchsorted(ends, max_tokens)) + 1]
    # Documents at which a chunk of tokens ends.
    stops = np.searchsorted(ends, np.arange(_CHUNK_TOKENS, ends[-1], _CHUNK_TOKENS)) + 1
    for documents in np.split(np.arange(ends.size), np.unique(stops)):
        if documents.size:
            starts, lengths = corpus.starts(documents), corpus.lengths[documents]
            tokens = corpus.gather(starts, lengths, vocab_size)
            counts += np.bincount(tokens, minlength=vocab_size)
    return counts

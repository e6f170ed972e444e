"""Shard statistics: documents, tokens, lengths, padding, token frequencies.

Tokens are counted chunk by chunk, so memory does not grow with the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_deberta.data import Integers
from megatron_deberta.data.dataset.best_fit import best_fit
from megatron_deberta.data.shards.reader import IndexedDataset

_CHUNK_TOKENS = 1 << 22
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class ShardStatistics:
    """Counts over some shards.

    Attributes:
        num_documents: documents with tokens.
        num_empty: documents without tokens.
        num_sequences: sentences.
        num_tokens: tokens.
        quantiles: tokens of a document at ``QUANTILES``.
        shortest: tokens of the shortest document.
        longest: tokens of the longest document.
        histogram: documents of 2^i to 2^(i+1) - 1 tokens, for i from 0.
        token_counts: [largest id + 1] occurrences of each id among the tokens counted.
        tokens_counted: number of tokens counted.
    """

    num_documents: int
    num_empty: int
    num_sequences: int
    num_tokens: int
    quantiles: tuple[int, ...]
    shortest: int
    longest: int
    histogram: Integers
    token_counts: Integers
    tokens_counted: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows of one epoch in a packing.

    Attributes:
        rows: number of rows.
        filled: share of positions that are not padding.
    """

    rows: int
    filled: float


def count_shards(shards: Sequence[IndexedDataset], most_tokens: int) -> ShardStatistics:
    """Compute statistics over shards.

    Args:
        shards: at least one.
        most_tokens: maximum number of tokens whose ids are counted, in evenly spread chunks.
    """
    lengths = document_lengths(shards)
    ordered = np.sort(lengths)
    picks = [round(share * (len(ordered) - 1)) for share in QUANTILES]
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1
    counts, counted = _count_tokens(shards, most_tokens)
    documents = sum(shard.num_documents for shard in shards)
    return ShardStatistics(
        num_documents=len(lengths),
        num_empty=documents - len(lengths),
        num_sequences=sum(shard.num_sequences for shard in shards),
        num_tokens=int(lengths.sum()),
        quantiles=tuple(ordered[picks].tolist()),
        shortest=int(ordered[0]),
        longest=int(ordered[-1]),
        histogram=np.bincount(exponents),
        token_counts=counts,
        tokens_counted=counted,
    )


def document_lengths(shards: Sequence[IndexedDataset]) -> Integers:
    """Return the number of tokens of each non-empty document."""
    lengths = np.concatenate([np.diff(shard.document_offsets) for shard in shards])
    return lengths[lengths > 0]


def pack_full_sentences(lengths: Integers, sequence_length: int) -> Packing:
    """Return the rows of ``full_sentences`` for documents of these lengths."""
    content = sequence_length - 2
    stream = int(lengths.sum()) + len(lengths) - 1
    rows = -(-stream // content)
    return Packing(rows, (stream + 2 * rows) / (rows * sequence_length))


def pack_doc_sentences(lengths: Integers, sequence_length: int) -> Packing:
    """Return the rows of ``doc_sentences`` for documents of these lengths."""
    rows = int((-(-lengths // (sequence_length - 2))).sum())
    return Packing(rows, (int(lengths.sum()) + 2 * rows) / (rows * sequence_length))


def pack_best_fit(lengths: Integers, sequence_length: int) -> Packing:
    """Return the rows of ``best_fit`` for documents of these lengths."""
    content = sequence_length - 2
    rest = -np.sort(-(lengths.astype(np.int64) % content))
    rest = rest[rest > 0]
    chunks = int((lengths // content).sum())
    rows = chunks + best_fit(rest + 1, content + 1)[1]
    parts = chunks + rest.size
    return Packing(rows, (int(lengths.sum()) + parts + rows) / (rows * sequence_length))


PACKINGS = {
    "full_sentences": pack_full_sentences,
    "doc_sentences": pack_doc_sentences,
    "best_fit": pack_best_fit,
}
"""Rows of the formats without pairs, by ``data.packing``."""


def _count_tokens(shards: Sequence[IndexedDataset], most_tokens: int) -> tuple[Integers, int]:
    chunks = [
        (shard, begin) for shard in shards for begin in range(0, shard.num_tokens, _CHUNK_TOKENS)
    ]
    num_chunks = max(1, min(len(chunks), most_tokens // _CHUNK_TOKENS))
    counts = np.zeros(0, np.int64)
    for pick in np.linspace(0, len(chunks) - 1, num_chunks).round().astype(int).tolist():
        shard, begin = chunks[pick]
        found = np.bincount(shard.tokens(begin, begin + _CHUNK_TOKENS), minlength=counts.size)
        found[: counts.size] += counts
        counts = found
    return counts, int(counts.sum())

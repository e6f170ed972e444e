"""Rows of framed tokens before masking, laid end to end without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_deberta.data import Bits, Integers
from megatron_deberta.data.dataset.corpus import Corpus
from megatron_deberta.data.vocabulary import Vocabulary


class TokenSpans(NamedTuple):
    """Spans of corpus tokens that form rows; a separator follows each span.

    Attributes:
        counts: [B] spans of each row, at least 1.
        starts: [P] first tokens, for ``Corpus.tokens``, row after row.
        lengths: [P] numbers of tokens.
        is_random_next: [B] 1 where the second span does not follow the first, else 0; None: not
            pairs.
    """

    counts: Integers
    starts: Integers
    lengths: Integers
    is_random_next: Integers | None = None


class RowPacking:
    """Base class of the ways to pack documents into the rows of an epoch.

    Attributes:
        num_rows: rows that are used of every epoch.
        index_entries: documents or sentences in an epoch's index; 0: epochs have none.
    """

    num_rows: int
    index_entries: int

    def epoch_rows(self, epoch: int) -> int:
        """Return the number of rows of an epoch."""
        return self.num_rows

    def spans(self, epoch: int, rows: Integers) -> TokenSpans:
        """Return the token spans of the given rows of an epoch."""
        raise NotImplementedError


class Row(NamedTuple):
    """One row, for display and tests.

    Attributes:
        tokens: [n] ids, framed by [CLS] and [SEP].
        document_starts: row positions at which documents (or the segments of a pair) begin, the
            first 0.
        is_random_next: 1 if the second segment does not follow the first, else 0; None: not a
            pair.
    """

    tokens: Integers
    document_starts: list[int]
    is_random_next: int | None


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows laid end to end.

    Attributes:
        tokens: [T] int64 ids; each row is framed by [CLS] and [SEP].
        sizes: [B] int64 tokens of each row.
        part_sizes: [P] int64 tokens of each document (or segment) in its row: [CLS] counts to the
            first, a separator to the part before it.
        part_counts: [B] int64 parts of each row.
        is_random_next: [B] int64 as in ``TokenSpans``, or None.
        mask_ids: [B] uint64 keys of the masks; None: the sample indices.
    """

    tokens: Integers
    sizes: Integers
    part_sizes: Integers
    part_counts: Integers
    is_random_next: Integers | None = None
    mask_ids: Bits | None = None

    def row(self, number: int) -> Row:
        """Return row ``number`` in [0, B)."""
        one = self.take(np.array([number]))
        starts = [0, *one.part_sizes.cumsum()[:-1].tolist()]
        is_random_next = None if one.is_random_next is None else int(one.is_random_next[0])
        return Row(one.tokens, starts, is_random_next)

    def take(self, order: Integers) -> RowBatch:
        """Return the rows of the given numbers, in that order."""
        return RowBatch(
            self.tokens[_runs(self.sizes, order)],
            self.sizes[order],
            self.part_sizes[_runs(self.part_counts, order)],
            self.part_counts[order],
            None if self.is_random_next is None else self.is_random_next[order],
            None if self.mask_ids is None else self.mask_ids[order],
        )


class RowSource(Protocol):
    """An endless, fixed sequence of rows."""

    def rows(self, indices: Integers) -> RowBatch:
        """Return the rows of the given indices >= 0, in that order."""


@dataclass(frozen=True, slots=True)
class ShiftedRows:
    """Rows of another source, with indices shifted by ``first``.

    Attributes:
        source: the rows.
        first: index of the source's row 0.
    """

    source: RowSource
    first: int

    def rows(self, indices: Integers) -> RowBatch:
        """Return the rows of the given indices >= ``first``."""
        return self.source.rows(indices - self.first)


def read_groups(groups: Integers, read: Callable[[int, Integers], RowBatch]) -> RowBatch:
    """Read rows group by group and merge them.

    Args:
        groups: [B] the group of each row.
        read: returns the rows of a group, given its number and the places [n] of its rows in the
            batch; either all groups are of pairs or none.
    """
    used = np.unique(groups).tolist()
    places = [np.flatnonzero(groups == group) for group in used]
    batches = [read(group, place) for group, place in zip(used, places, strict=True)]
    if len(batches) == 1:
        return batches[0]
    merged: dict[str, Any] = {}
    for field in fields(RowBatch):
        arrays = [getattr(batch, field.name) for batch in batches]
        merged[field.name] = None if arrays[0] is None else np.concatenate(arrays)
    return RowBatch(**merged).take(np.argsort(np.concatenate(places)))


def assemble(corpus: Corpus, vocabulary: Vocabulary, spans: TokenSpans) -> RowBatch:
    """Read spans and build their rows: [CLS] span [SEP] span [SEP] ...

    Args:
        corpus: documents that are read.
        vocabulary: ids of special tokens.
        spans: of the rows.

    Raises:
        DataError: the shard holds an id outside the vocabulary.
    """
    first_spans = spans.counts.cumsum() - spans.counts
    part_sizes = spans.lengths + 1
    part_sizes[first_spans] += 1
    ends = part_sizes.cumsum()
    begins = ends - part_sizes
    tokens = np.empty(int(ends[-1]), np.int64)
    is_text = np.ones(tokens.size, np.bool_)
    is_text[begins[first_spans]] = False
    is_text[ends - 1] = False
    tokens[is_text] = corpus.gather(spans.starts, spans.lengths, vocabulary.size)
    tokens[begins[first_spans]] = vocabulary.cls_id
    tokens[ends - 1] = vocabulary.sep_id
    sizes = np.add.reduceat(part_sizes, first_spans)
    return RowBatch(tokens, sizes, part_sizes, spans.counts, spans.is_random_next)


def _runs(sizes: Integers, order: Integers) -> Integers:
    """Return the indices of the entries of runs of the given sizes, runs in ``order``."""
    begins = (np.cumsum(sizes) - sizes)[order]
    taken = sizes[order]
    shift = begins - (np.cumsum(taken) - taken)
    return np.repeat(shift, taken) + np.arange(int(taken.sum()))

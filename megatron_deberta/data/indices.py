"""Indices of a run, which can be built before it starts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from megatron_deberta.config.phases import Segment, segments
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.build import Corpora, open_corpora, training_rows, validation_rows
from megatron_deberta.data.dataset.blend import BlendedRows
from megatron_deberta.data.dataset.index_cache import WORTH_KEEPING
from megatron_deberta.data.dataset.packing import PackedRows
from megatron_deberta.data.dataset.rows import RowSource, ShiftedRows
from megatron_deberta.data.vocabulary import Vocabulary


class Index(NamedTuple):
    """Index of one epoch of packed rows.

    Attributes:
        rows: the rows.
        epoch: epoch of ``rows``.
    """

    rows: PackedRows
    epoch: int

    @property
    def is_kept(self) -> bool:
        """Whether the index is large enough to be kept on disk."""
        return self.rows.index_entries >= WORTH_KEEPING


def list_indices(config: RunConfig, vocabulary: Vocabulary) -> list[Index]:
    """List the indices that a run reads, each once, in the order in which it does.

    Opens the shards and, by that, builds the indices that do not depend on the epoch.

    Args:
        config: the run.
        vocabulary: of its tokenizer.

    Raises:
        ConfigError: ``data.train`` or ``data.validation`` is malformed.
        DataError: a shard or an index is damaged, or the index cannot be written.
    """
    opened: dict[tuple[tuple[str, ...], tuple[str, ...]], Corpora] = {}
    found: dict[tuple[str, int], Index] = {}
    for part in segments(config):
        data = part.config.data
        corpora = opened.get((data.train, data.validation))
        if corpora is None:
            corpora = open_corpora(part.config, vocabulary, hashes=False)
            opened[data.train, data.validation] = corpora
        for index in _of_segment(part, vocabulary, corpora):
            found.setdefault((index.rows.identity, index.epoch), index)
    return list(found.values())


def build_index(config: RunConfig, vocabulary: Vocabulary, number: int) -> int:
    """Build one of the indices of a run, unless it is there.

    Args:
        config: the run.
        vocabulary: of its tokenizer.
        number: place of the index in ``list_indices``.

    Returns:
        ``number``.
    """
    index = _opened(config, vocabulary)[number]
    index.rows.build_index(index.epoch)
    return number


# A worker opens the shards once, not for every index.
_opened = functools.lru_cache(maxsize=1)(list_indices)


def _of_segment(part: Segment, vocabulary: Vocabulary, corpora: Corpora) -> Iterator[Index]:
    validation = validation_rows(part.config, vocabulary, corpora)
    if validation is not None:
        yield from _of_rows(validation, 0, 1)
    end = part.first_sample + part.steps * part.config.train.global_batch_size
    rows = training_rows(part.config, vocabulary, corpora, part.stage)
    yield from _of_rows(rows, part.first_sample, end)


def _of_rows(rows: RowSource, begin: int, end: int) -> Iterator[Index]:
    """Yield the indices of the rows ``begin`` to ``end``."""
    if begin >= end:
        return
    if isinstance(rows, ShiftedRows):
        yield from _of_rows(rows.source, begin - rows.first, end - rows.first)
    elif isinstance(rows, BlendedRows):
        for source, first, last in rows.parts(begin, end):
            yield from _of_rows(source, first, last)
    else:
        assert isinstance(rows, PackedRows)
        epochs = range(begin // rows.rows_per_epoch, (end - 1) // rows.rows_per_epoch + 1)
        for epoch in {rows.index_epoch(epoch): None for epoch in epochs}:
            yield Index(rows, epoch)

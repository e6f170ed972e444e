"""Best-fit packing: the algorithm, and rows of whole documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_deberta.data.dataset.best_fit import best_fit
from megatron_deberta.data.dataset.corpus import Corpus
from megatron_deberta.data.dataset.packing import PackedRows
from megatron_deberta.data.shards.reader import IndexedDataset


def one_by_one(sizes: list[int], capacity: int) -> list[int]:
    """Best-fit-decreasing as in the literature, one item at a time."""
    rooms: list[int] = []
    for size in sizes:
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting)[1]] -= size
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


@pytest.mark.parametrize("capacity", [1, 7, 31, 128])
def test_it_is_best_fit_decreasing(capacity: int) -> None:
    draw = np.random.default_rng(capacity)
    for number in (1, 2, 50, 400):
        sizes = -np.sort(-draw.integers(1, capacity + 1, number))
        bins, count = best_fit(sizes, capacity)
        used = np.bincount(bins, weights=sizes, minlength=count).astype(int)
        assert sorted((capacity - used).tolist()) == one_by_one(sizes.tolist(), capacity)


def test_no_items() -> None:
    assert best_fit(np.zeros(0, np.int64), 5)[1] == 0


def rows_of(rows: PackedRows, epoch: int) -> list[Any]:
    first = epoch * rows.rows_per_epoch
    return [rows.rows(np.array([first + n])).row(0) for n in range(rows.rows_per_epoch)]


def test_only_longer_documents_are_cut(write_shard: Any, vocabulary: Any) -> None:
    lengths = [3, 30, 14, 5, 7, 28, 1, 13, 9]
    documents = [np.full(length, 10 + number) for number, length in enumerate(lengths)]
    corpus = Corpus([IndexedDataset(write_shard(documents))])
    rows = PackedRows(corpus, vocabulary, 16, "best_fit", 1)
    orders = set()
    for epoch in range(4):
        seen = [row.tokens.tolist() for row in rows_of(rows, epoch)]
        for number, length in enumerate(lengths):
            pieces = [tokens.count(10 + number) for tokens in seen if 10 + number in tokens]
            rest = [length % 14] if length % 14 else []
            assert sorted(pieces) == sorted([14] * (length // 14) + rest)
        orders.add(str(seen))
    assert len(orders) == 4


@pytest.mark.parametrize("lengths", [[14, 28], [3, 3, 3], [1]])
def test_documents_that_fill_rows_exactly_or_not_at_all(
    lengths: list[int], write_shard: Any, vocabulary: Any
) -> None:
    documents = [np.full(length, 10 + number) for number, length in enumerate(lengths)]
    rows = PackedRows(
        Corpus([IndexedDataset(write_shard(documents))]), vocabulary, 16, "best_fit", 1
    )
    together = rows.rows(np.arange(rows.rows_per_epoch)).tokens
    assert (~vocabulary.is_special[together]).sum() == sum(lengths)

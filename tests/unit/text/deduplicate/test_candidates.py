"""Pairs of documents that share a key, and the settings that make them likely."""

import numpy as np
import pytest

from megatron_deberta.errors import ConfigError
from megatron_deberta.text.deduplicate.pairs import (
    WINDOW,
    crowded_buckets,
    jaccard_of,
    num_parts,
    pair_up,
    sort_buckets,
)
from megatron_deberta.text.deduplicate.sign import PERMUTATIONS, Settings, recall


def pairs_of(keys, documents):
    later, earlier = pair_up(
        *sort_buckets(np.array(keys, np.uint64), np.array(documents, np.int64))
    )
    assert (later > earlier).all()
    return list(zip(later.tolist(), earlier.tolist(), strict=True))


def test_small_buckets_are_complete():
    assert pairs_of([], []) == []
    assert pairs_of([5, 6, 7], [0, 1, 2]) == []
    assert pairs_of([9, 5, 9, 5, 9], [4, 3, 0, 1, 2]) == [(2, 0), (3, 1), (4, 0), (4, 2)]
    documents = np.arange(WINDOW + 1)
    assert len(pairs_of([1] * len(documents), documents)) == len(documents) * WINDOW // 2


def test_large_buckets_grow_linearly_and_stay_connected():
    found = pairs_of([1] * 500, np.arange(500) * 3)
    assert len(set(found)) == len(found) <= 500 * (WINDOW + 1)
    assert {(later, 0) for later in range(3, 1500, 3)} <= set(found)


def test_only_buckets_without_all_pairs_are_crowded():
    full, crowded = np.arange(WINDOW + 1), np.arange(100, 100 + 3 * (WINDOW + 2), 3)
    keys = np.array([7] * len(full) + [9] * len(crowded) + [3] * len(crowded), np.uint64)
    documents = np.concatenate([full, crowded[::-1], crowded])
    found, bucket, sizes = crowded_buckets(*sort_buckets(keys, documents))
    assert found.tolist() == np.repeat(crowded, 2).tolist()
    assert bucket.tolist() == [0, 1] * len(crowded)
    assert sizes.tolist() == [len(crowded)] * 2
    assert [len(each) for each in crowded_buckets(*sort_buckets(keys[:0], documents[:0]))] == [
        0
    ] * 3


def test_parts_divide_the_ranges():
    assert num_parts(0) == num_parts(1 << 21) == 1
    assert num_parts((1 << 21) + 1) == 2
    assert num_parts(10**12) == 256


def test_bands_find_pairs_at_the_threshold():
    settings = Settings()
    assert (settings.bands, settings.rows) == (25, 5)
    for threshold in (0.3, 0.5, 0.7, 0.8, 0.95, 1.0):
        settings = Settings(threshold=threshold)
        assert settings.bands * settings.rows <= PERMUTATIONS
        assert recall(threshold, settings.rows, settings.bands) >= 0.98
        assert settings.least_estimate <= threshold


def test_settings_that_cannot_be():
    for wrong in ({"threshold": 0.1}, {"threshold": 1.1}, {"ngram": 0}):
        with pytest.raises(ConfigError):
            Settings(**wrong)


def test_jaccard():
    left, right = np.array([1, 2, 3], np.uint64), np.array([2, 3, 4], np.uint64)
    assert jaccard_of(left, right) == 0.5
    assert jaccard_of(left, left) == 1.0

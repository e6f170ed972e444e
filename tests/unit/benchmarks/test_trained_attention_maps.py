"""The picture of trained models' attention maps: terms and table."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.learn.attention_maps import spread
from megatron_deberta.attention_maps.compute import TextMaps


def test_spread_ignores_constants_of_a_query() -> None:
    values = np.zeros((1, 2, 2, 2, 4), dtype=np.float32)  # layers, heads, parts, queries, keys
    values[0, 0, 1] = [[1, -1, 1, -1], [5, 5, 5, 5]]
    values[0, 1, 1] = 7
    maps = TextMaps("m", ("a", "b"), 1, (1,), (1, 2), ("probabilities", "c2c"), values)
    assert spread(maps, "c2c") == pytest.approx(0.5)
    assert spread(maps, "p2c") is None

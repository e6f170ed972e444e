"""The picture of trained models' attention maps: terms and table."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.learn.attention_maps import spread
from benchmarks.tables.learn import attention_maps
from megatron_deberta.attention_maps.compute import TextMaps


def test_spread_ignores_constants_of_a_query() -> None:
    values = np.zeros((1, 2, 2, 2, 4), dtype=np.float32)  # layers, heads, parts, queries, keys
    values[0, 0, 1] = [[1, -1, 1, -1], [5, 5, 5, 5]]
    values[0, 1, 1] = 7
    maps = TextMaps("m", ("a", "b"), 1, (1,), (1, 2), ("probabilities", "c2c"), values)
    assert spread(maps, "c2c") == pytest.approx(0.5)
    assert spread(maps, "p2c") is None


def test_table_names_missing_terms() -> None:
    model = {"variant": "-C2P", "loss": 4.25, "unigram_loss": 5.5}
    record = {
        "models": [model | {"spread": {"c2c": 0.5, "c2p": None, "p2c": 1.25}}],
        "layers": 3, "width": 128, "tokens": 819200,
    }  # fmt: skip
    table = attention_maps(record)
    assert table.startswith(
        "![Attention maps of -C2P](../benchmarks/results/cpu/attention_maps.png)"
    )
    assert "| -C2P | 4.25 | 0.50 | none | 1.25 |" in table
    assert "trained on 0.82M tokens; unigram cross-entropy 5.50 nat" in table

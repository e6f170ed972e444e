"""Pseudo-log-likelihoods are the same on every layout, in a training engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_deberta.evaluate.likelihood import score_rows
from megatron_deberta.evaluate.minimal_pairs import MinimalPair, build_minimal_pairs
from tests.support.layout_matrix import Layout, build, groups_of, run_config
from tests.support.minimal_pairs import PAIRS
from tests.support.ranks import RankPool
from tests.support.tiny_models import tiny_tokenizer


def scores_of(rank: int, layout: Layout | None) -> list[float]:
    """Return the scores of all sentences and the accuracies, on this rank."""
    groups = groups_of(layout)
    config = run_config(layout, micro_batch=2)
    config = replace(
        config, model=replace(config.model, vocab_size=208, max_position_embeddings=96)
    )
    _, engine = build(config, groups)
    pairs = [MinimalPair(*pair) for pair in PAIRS]
    task = build_minimal_pairs(config, tiny_tokenizer(), pairs)
    found = score_rows(engine.module, task.rows, groups, 60, multiple=task.multiple)
    evaluation = task.evaluate(engine.module, groups, lambda: False)
    engine.destroy()
    assert found is not None
    assert evaluation is not None
    return [*found.tolist(), *evaluation.metrics.values()]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(1, 2, False, "selective"), marks=pytest.mark.nightly),
        pytest.param(Layout(2, 1, False, "full"), marks=pytest.mark.slow),
        pytest.param(Layout(2, 3, True, "none"), marks=pytest.mark.nightly),
    ],
    ids=lambda layout: layout.name,
)
def test_layouts_agree(four_ranks: RankPool, layout: Layout) -> None:
    expected = scores_of(0, None)
    for scores in four_ranks.run(scores_of, layout):
        np.testing.assert_allclose(scores, expected, rtol=1e-5)

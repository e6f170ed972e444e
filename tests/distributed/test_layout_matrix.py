"""A slice of the layout matrix: real model, engine and step (``make test-matrix`` runs all)."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import pytest

from tests.support.layout_matrix import ALL, PAIRS, Layout, compare, run_layout
from tests.support.ranks import RankPool

STEPS = 20


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    return run_layout(0, None, STEPS)


@pytest.mark.parametrize("layout", PAIRS, ids=lambda layout: layout.name)
def test_layout_is_the_same_run(
    four_ranks: RankPool, oracle: dict[str, Any], layout: Layout
) -> None:
    result = compare(layout, four_ranks.run(run_layout, layout, STEPS), oracle)
    assert result["passed"], result


def test_pairs_of_segments_are_the_same_run(four_ranks: RankPool) -> None:
    """Token types and the next-sentence head, which every rank computes whole."""
    steps = 6
    oracle = run_layout(0, None, steps, True)
    assert len(oracle["losses"]) == 2 * steps
    for layout in (Layout(1, 3, False, "none"), Layout(2, 1, True, "full"), PAIRS[-1]):
        ranks = four_ranks.run(run_layout, layout, steps, True)
        result = compare(layout, ranks, oracle)
        assert result["passed"], result


def test_slice_covers_every_pair_of_settings() -> None:
    def pairs(layouts: list[Layout]) -> set[Any]:
        return {
            pair for layout in layouts for pair in itertools.combinations(asdict(layout).items(), 2)
        }

    assert pairs(PAIRS) == pairs(ALL)

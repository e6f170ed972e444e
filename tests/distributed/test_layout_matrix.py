"""A pairwise selection of the layout matrix; ``make test-matrix`` runs all layouts."""

from __future__ import annotations

import functools
import itertools
from dataclasses import asdict
from typing import Any

import pytest

from tests.support.layout_matrix import ALL, PAIRS, Layout, compare, run_layout
from tests.support.ranks import RankPool


@functools.cache
def reference(steps: int, segments: bool = False) -> dict[str, Any]:
    return run_layout(0, None, steps, segments)


@pytest.fixture(scope="module")
def runs() -> dict[Layout, list[dict[str, Any]]]:
    """Results of the ranks by layout: the shorter runs are the beginnings of the longer ones."""
    return {}


@pytest.mark.parametrize("steps", [pytest.param(20, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("layout", PAIRS, ids=lambda layout: layout.name)
def test_layouts_have_equal_losses_and_gradients(
    four_ranks: RankPool, runs: dict[Layout, list[dict[str, Any]]], layout: Layout, steps: int
) -> None:
    if layout not in runs:
        runs[layout] = four_ranks.run(run_layout, layout, steps)
    ranks = [
        {**rank, "losses": rank["losses"][:steps], "norms": rank["norms"][:steps]}
        for rank in runs[layout]
    ]
    result = compare(layout, ranks, reference(steps))
    assert result["passed"], result


def test_layouts_agree_with_token_types_and_next_sentence_head(four_ranks: RankPool) -> None:
    steps = 3
    expected = reference(steps, segments=True)
    assert len(expected["losses"]) == 2 * steps
    for layout in (Layout(1, 3, False, "none"), Layout(2, 1, True, "full"), PAIRS[-1]):
        ranks = four_ranks.run(run_layout, layout, steps, True)
        result = compare(layout, ranks, expected)
        assert result["passed"], result


def test_selection_covers_every_pair_of_settings() -> None:
    def pairs(layouts: list[Layout]) -> set[Any]:
        return {
            pair for layout in layouts for pair in itertools.combinations(asdict(layout).items(), 2)
        }

    assert pairs(PAIRS) == pairs(ALL)

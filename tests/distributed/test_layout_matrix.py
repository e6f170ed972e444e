"""A pairwise selection of the layout matrix; ``make test-matrix`` runs all layouts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
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


FEW = {
    Layout(1, 0, False, "full"),
    Layout(2, 3, True, "none"),
    Layout(4, 1, True, "selective"),
    Layout(4, 2, False, "none"),
}
"""Layouts that contain every setting."""
CASES = [
    *(pytest.param(layout, 10, marks=pytest.mark.nightly) for layout in PAIRS),
    *(pytest.param(layout, 2, marks=() if layout in FEW else pytest.mark.slow) for layout in PAIRS),
]


@pytest.mark.parametrize(("layout", "steps"), CASES, ids=lambda case: getattr(case, "name", case))
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


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 1, True, "full"),
        pytest.param(Layout(1, 3, False, "none"), marks=pytest.mark.nightly),
        pytest.param(PAIRS[-1], marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout.name,
)
def test_layouts_agree_with_token_types_and_next_sentence_head(
    four_ranks: RankPool, layout: Layout
) -> None:
    steps = 2
    expected = reference(steps, segments=True)
    assert len(expected["losses"]) == 2 * steps
    ranks = four_ranks.run(run_layout, layout, steps, True)
    result = compare(layout, ranks, expected)
    assert result["passed"], result


def test_selection_covers_every_pair_of_settings() -> None:
    def pairs(layouts: list[Layout]) -> set[Any]:
        return {
            pair for layout in layouts for pair in itertools.combinations(asdict(layout).items(), 2)
        }

    assert pairs(PAIRS) == pairs(ALL)


def test_short_selection_covers_every_setting() -> None:
    def settings(layouts: Iterable[Layout]) -> set[Any]:
        return {pair for layout in layouts for pair in asdict(layout).items()}

    assert settings(FEW) == settings(ALL)

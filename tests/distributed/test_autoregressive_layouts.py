"""Masked and autoregressive steps have the same losses on every layout as in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.support.autoregressive import run_two_forms
from tests.support.layout_matrix import Layout, compare
from tests.support.ranks import RankPool

CASES = [Layout(2, 1, False, "none"), Layout(2, 3, True, "full"), Layout(1, 2, False, "selective")]
MORE = [Layout(2, 2, False, "full"), Layout(4, 1, True, "selective"), Layout(1, 3, False, "full")]


@functools.cache
def reference(steps: int) -> dict[str, Any]:
    return run_two_forms(0, None, steps)


def check(ranks: RankPool, layout: Layout, steps: int) -> None:
    result = compare(layout, ranks.run(run_two_forms, layout, steps), reference(steps))
    assert result["passed"], result


@pytest.mark.parametrize(
    "layout",
    [pytest.param(case, marks=pytest.mark.slow if case.zero_stage == 3 else ()) for case in CASES],
    ids=lambda layout: layout.name,
)
def test_layouts_agree(four_ranks: RankPool, layout: Layout) -> None:
    check(four_ranks, layout, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [*CASES, *MORE], ids=lambda layout: layout.name)
def test_layouts_agree_over_twenty_steps(four_ranks: RankPool, layout: Layout) -> None:
    check(four_ranks, layout, 20)

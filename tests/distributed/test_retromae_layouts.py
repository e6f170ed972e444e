"""RetroMAE has the same losses on every layout as in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megatron_deberta.config.schema import ObjectiveConfig
from tests.support.layout_matrix import Layout, compare
from tests.support.ranks import RankPool
from tests.support.retromae import run_retromae

MEAN = ObjectiveConfig(name="retromae")
CLS = ObjectiveConfig(name="retromae", retromae_pooling="cls")
CASES = [
    (Layout(2, 3, True, "full"), MEAN),
    (Layout(2, 1, False, "selective"), CLS),
]
MORE = [
    (Layout(1, 2, False, "none"), MEAN),
    (Layout(4, 1, True, "selective"), MEAN),
    (Layout(1, 3, False, "full"), CLS),
]


@functools.cache
def reference(objective: ObjectiveConfig, steps: int) -> dict[str, Any]:
    return run_retromae(0, None, steps, objective)


def check(ranks: RankPool, layout: Layout, objective: ObjectiveConfig, steps: int) -> None:
    expected = reference(objective, steps)
    result = compare(layout, ranks.run(run_retromae, layout, steps, objective), expected)
    assert result["passed"], result
    assert any(name.startswith("row_decoder.") for name in expected["first"])


def name(case: Any) -> Any:
    return case.name if isinstance(case, Layout) else case.retromae_pooling


@pytest.mark.parametrize(("layout", "objective"), CASES, ids=name)
def test_layouts_agree(four_ranks: RankPool, layout: Layout, objective: ObjectiveConfig) -> None:
    check(four_ranks, layout, objective, 2)


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "objective"), [*CASES, *MORE], ids=name)
def test_layouts_agree_over_twenty_steps(
    four_ranks: RankPool, layout: Layout, objective: ObjectiveConfig
) -> None:
    check(four_ranks, layout, objective, 20)

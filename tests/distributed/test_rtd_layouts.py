"""Replaced-token detection has the same losses and samples on every layout as in one process."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megatron_deberta.config.schema import ModelConfig, RTDConfig
from tests.support.layout_matrix import Layout, compare
from tests.support.ranks import RankPool
from tests.support.rtd_layouts import ALTERNATING, JOINT, RTD, run_rtd

ES = replace(RTD, embedding_sharing="es")
NONE = replace(RTD, embedding_sharing="none", generator_layers=2)
TP4 = Layout(4, 1, True, "selective")
CASES = [
    (Layout(2, 1, False, "none"), RTD),
    (Layout(2, 3, True, "full"), RTD),
    (Layout(1, 2, False, "selective"), ES),
]
SLOW = {TP4, Layout(2, 3, True, "full")}
MORE = [
    (Layout(2, 2, False, "full"), RTD),
    (Layout(2, 3, False, "none"), ES),
    (TP4, RTD),
    (Layout(1, 3, False, "full"), NONE),
    (Layout(2, 2, True, "none"), NONE),
]


@functools.cache
def reference(model: ModelConfig, steps: int, rtd: RTDConfig) -> dict[str, Any]:
    return run_rtd(0, None, model, steps, rtd)


def check(
    ranks: RankPool, layout: Layout, model: ModelConfig, steps: int, rtd: RTDConfig = JOINT
) -> None:
    expected = reference(model, steps, rtd)
    assert len(expected["losses"]) == 2 * steps
    results = ranks.run(run_rtd, layout, model, steps, rtd)
    result = compare(layout, results, expected)
    assert result["passed"], result
    pairs = [
        (ours, theirs)
        for rank in results
        for index, drawn in rank["samples"].items()
        for ours, theirs in zip(drawn, expected["samples"][index], strict=True)
    ]
    flips = sum(ours != theirs for ours, theirs in pairs)
    assert len(pairs) >= 20 * steps
    assert flips <= len(pairs) / 10_000, f"{flips} of {len(pairs)} draws differ"


def name(case: Any) -> Any:
    return case.name if isinstance(case, Layout) else case.embedding_sharing


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case[0] in SLOW else ())
        for case in [*CASES, (TP4, RTD)]
    ],
    ids=name,
)
def test_layouts_agree(four_ranks: RankPool, layout: Layout, model: ModelConfig) -> None:
    check(four_ranks, layout, model, 2)


ALTERNATING_CASES = [
    (Layout(2, 3, False, "none"), RTD),
    (Layout(2, 1, True, "none"), RTD),
    (Layout(1, 2, False, "full"), NONE),
]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(*ALTERNATING_CASES[0], marks=pytest.mark.nightly),
        pytest.param(*ALTERNATING_CASES[1], marks=pytest.mark.slow),
        ALTERNATING_CASES[2],
    ],
    ids=name,
)
def test_layouts_agree_with_alternating_updates(
    four_ranks: RankPool, layout: Layout, model: ModelConfig
) -> None:
    check(four_ranks, layout, model, 2, ALTERNATING)


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "model"), ALTERNATING_CASES, ids=name)
def test_layouts_agree_with_alternating_updates_over_twenty_steps(
    four_ranks: RankPool, layout: Layout, model: ModelConfig
) -> None:
    check(four_ranks, layout, model, 20, ALTERNATING)


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "model"), [*CASES, *MORE], ids=name)
def test_layouts_agree_over_more_steps(
    four_ranks: RankPool, layout: Layout, model: ModelConfig
) -> None:
    check(four_ranks, layout, model, 20 if (layout, model) in CASES else 10)

"""Other objectives than masked language modelling have the same losses on every layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.layout_matrix import Layout, compare
from tests.support.objective_layouts import ALTERNATING, RTD, run_retromae, run_rtd, run_two_forms
from tests.support.ranks import RankPool
from tests.support.selection import every

Run = Callable[..., dict[str, Any]]
ES = replace(RTD, embedding_sharing="es")
NONE = replace(RTD, embedding_sharing="none", generator_layers=2)
QUICK: list[tuple[Run, tuple[Any, ...], Layout]] = [
    (run_two_forms, (), Layout(2, 1, False, "none")),
    (run_two_forms, (), Layout(1, 2, False, "selective")),
    (run_retromae, ("mean",), Layout(2, 3, True, "full")),
    (run_retromae, ("cls",), Layout(2, 1, False, "selective")),
    (run_rtd, (NONE, ALTERNATING), Layout(1, 2, False, "full")),
    (run_rtd, (ES,), Layout(1, 2, False, "selective")),
]
SLOW = [
    (run_rtd, (RTD,), Layout(2, 1, False, "none")),
    (run_rtd, (RTD,), Layout(2, 3, True, "full")),
]
MORE = [
    (run_rtd, (RTD, ALTERNATING), Layout(2, 1, True, "none")),
    (run_two_forms, (), Layout(2, 3, True, "full")),
    (run_two_forms, (), Layout(2, 2, False, "full")),
    (run_two_forms, (), Layout(4, 1, True, "selective")),
    (run_two_forms, (), Layout(1, 3, False, "full")),
    (run_retromae, ("mean",), Layout(1, 2, False, "none")),
    (run_retromae, ("mean",), Layout(4, 1, True, "selective")),
    (run_retromae, ("cls",), Layout(1, 3, False, "full")),
    (run_rtd, (RTD,), Layout(4, 1, True, "selective")),
    (run_rtd, (RTD,), Layout(2, 2, False, "full")),
    (run_rtd, (ES,), Layout(2, 3, False, "none")),
    (run_rtd, (NONE,), Layout(1, 3, False, "full")),
    (run_rtd, (NONE,), Layout(2, 2, True, "none")),
    (run_rtd, (RTD, ALTERNATING), Layout(2, 3, False, "none")),
]


@functools.cache
def reference(run: Run, options: tuple[Any, ...], steps: int) -> dict[str, Any]:
    return run(0, None, steps, *options)


@pytest.mark.parametrize(
    ("run", "options", "layout", "steps"),
    [
        *every(2, [(*case, 3 if case[0] is run_two_forms else 2) for case in QUICK]),
        *(pytest.param(*case, 2, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(*case, 20, marks=pytest.mark.nightly) for case in (*QUICK, *SLOW, *MORE)),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", None)),
)
def test_layouts_agree(
    four_ranks: RankPool, run: Run, options: tuple[Any, ...], layout: Layout, steps: int
) -> None:
    expected = reference(run, options, steps)
    results = four_ranks.run(run, layout, steps, *options)
    result = compare(layout, results, expected)
    assert result["passed"], result
    if run is run_two_forms:
        return
    # Of the encoder or generator, and of the decoder or discriminator.
    assert len(expected["losses"]) == 2 * steps
    if run is run_retromae:
        assert any(name.startswith("row_decoder.") for name in expected["first"])
        return
    pairs = [
        (ours, theirs)
        for rank in results
        for index, drawn in rank["samples"].items()
        for ours, theirs in zip(drawn, expected["samples"][index], strict=True)
    ]
    flips = sum(ours != theirs for ours, theirs in pairs)
    assert len(pairs) >= 20 * steps
    assert flips <= len(pairs) / 10_000, f"{flips} of {len(pairs)} draws differ"

"""A slice of the campaign ``tests/faults/layout_moves.py``; its results are committed."""

from __future__ import annotations

from pathlib import Path

from tests.faults.layout_moves import Campaign


def test_a_run_goes_on_on_another_layout_as_if_it_had_been_there_always(tmp_path: Path) -> None:
    with Campaign(tmp_path, end=15) as campaign:
        case = campaign.run_case(3)
    assert case["passed"], case

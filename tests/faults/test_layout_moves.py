"""One case of the campaign ``tests.faults.layout_moves``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.layout_moves import Campaign


@pytest.mark.nightly
def test_run_resumes_on_another_layout(tmp_path: Path) -> None:
    with Campaign(tmp_path, end=15) as campaign:
        case = campaign.run_case(3)
    assert case["ok"], case

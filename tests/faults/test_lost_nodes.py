"""A case of every kind of the campaign ``tests.faults.lost_nodes``."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tables.faults import LOST_NODES_COUNTS
from tests.faults.lost_nodes import LostNodes


@pytest.fixture(scope="module")
def campaign(run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> LostNodes:
    return LostNodes(tmp_path_factory.mktemp("lost"), run_yaml, steps=20)


# A lost node on two ranks: tests/integration/test_lost_node.py.
@pytest.mark.nightly
@pytest.mark.parametrize("case", LOST_NODES_COUNTS)
def test_resumed_run_is_identical(campaign: LostNodes, case: str) -> None:
    outcome = campaign.run(case, 0)
    assert outcome["ok"], outcome

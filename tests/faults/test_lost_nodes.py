"""A case of every kind of the campaign ``tests.faults.lost_nodes``."""

from __future__ import annotations

import pytest

from benchmarks.lib.campaigns import code_digest
from benchmarks.tables import faults
from benchmarks.tables.faults import LOST_NODES_CODE, LOST_NODES_COUNTS
from tests.faults.lost_nodes import LostNodes
from tests.support.jobs import prepare
from tests.support.shared import shared_folder


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> LostNodes:
    run_yaml = shared_folder(tmp_path_factory, "corpus", prepare) / "run.yaml"
    return LostNodes(tmp_path_factory.mktemp("lost"), run_yaml, steps=20)


# A lost node on two ranks: tests/integration/test_lost_node.py.
@pytest.mark.nightly
@pytest.mark.parametrize("case", LOST_NODES_COUNTS)
def test_resumed_run_is_identical(campaign: LostNodes, case: str) -> None:
    outcome = campaign.run(case, 0)
    assert outcome["ok"], outcome


@pytest.mark.slow
def test_table_counts_results_of_the_present_code() -> None:
    code = code_digest(LOST_NODES_CODE)
    line = {"case": "node", "ok": True, "revision": "abc", "steps_repeated": 2, "local": [3]}
    lines = [{**line, "code_digest": code}, {**line, "code_digest": "other"}]
    table = faults.lost_nodes(lines)
    assert "(`node`) | 1 / 1 | 20 | 1 | 2, 2 | abc |" in table
    assert "(`process`) | not run | 20 |" in table

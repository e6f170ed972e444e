"""A few cases of the campaign ``tests.faults.text_kills``: each engine and each kind of victim."""

from __future__ import annotations

import pytest

from tests.faults.text_kills import PHASES, VICTIMS, Fixture, plan_case, prepare, run_case


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    return prepare(tmp_path_factory.mktemp("kills"))


def test_a_campaign_kills_at_least_five_times_in_each_phase() -> None:
    plans = [plan_case(number) for number in range(100)]
    for command, point in PHASES:
        found = [plan for plan in plans if (plan["command"], plan["point"]) == (command, point)]
        kinds = {(plan["engine"], plan["victim"]) for plan in found}
        assert len(found) == len(kinds) >= 5
    assert {(plan["engine"], plan["victim"]) for plan in plans} == set(VICTIMS)


# A worker, an MPI rank, a Dask worker, an array task, each engine's driver, all array tasks, a Dask
# node and the scheduler.
@pytest.mark.nightly
@pytest.mark.parametrize("number", range(10))
def test_killed_and_resumed_run_writes_the_same_bytes(fixture: Fixture, number: int) -> None:
    case = run_case(fixture, number)
    assert case["ok"], case

"""A few cases of the campaign ``tests.faults.preprocess_kills``."""

from __future__ import annotations

import pytest

from tests.faults.preprocess_kills import Fixture, prepare, run_case


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    return prepare(tmp_path_factory.mktemp("kills"))


# One of each phase, and of each kind of process to kill.
@pytest.mark.parametrize("number", [1000, 1006, 1012, 1018, 1004])
def test_killed_and_resumed_run_writes_the_same_bytes(fixture: Fixture, number: int) -> None:
    case = run_case(fixture, number)
    assert case["passed"], case

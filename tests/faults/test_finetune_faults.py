"""Tests one case of each kind of ``tests.faults.finetune_faults``."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.finetune_faults import CASES, KINDS, FinetuneFaults, plan_case
from tests.faults.finetune_points import FULL, KILLED


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> FinetuneFaults:
    return FinetuneFaults(tmp_path_factory.mktemp("faults"))


def test_forty_cases_have_every_kind_and_moment() -> None:
    plans = [plan_case(number) for number in range(CASES)]
    assert Counter(plan["kind"] for plan in plans) == {
        "kill": 16, "preempt": 8, "full disk": 8, "full disk, continue": 8
    }  # fmt: skip
    assert Counter(plan["ranks"] for plan in plans) == {1: 30, 2: 10}
    for kind in KINDS:
        firsts = [plan["faults"][0] for plan in plans if plan["kind"] == kind]
        points = {fault["point"] for fault in firsts}
        if kind == "preempt":
            assert len(points) == 7
        else:
            assert points == set(KILLED if kind == "kill" else FULL)
        assert any(fault["is_killed"] for fault in firsts) == ("continue" in kind)


# A full disk during the save of the best step, which is then killed. Nightly: a kill while the
# tensors of a new best checkpoint are written, preemption, a stop by a full disk, and two ranks.
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(14, marks=pytest.mark.slow),
        *(pytest.param(number, marks=pytest.mark.nightly) for number in (11, 22, 13, 6, 9, 27, 29)),
    ],
)
def test_the_best_checkpoint_is_that_of_the_uninterrupted_run(
    faults: FinetuneFaults, number: int
) -> None:
    case = faults.run_case(number)
    assert case["ok"], case

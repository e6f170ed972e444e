"""A few of the cases of ``tests.faults.dedup_kills``."""

from pathlib import Path

import pytest

from tests.faults.dedup_kills import CASES, kill_and_resume, make_reference

SLICE = [("sign", "all"), ("collect", "worker"), ("write", "first process")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    path = tmp_path_factory.mktemp("kills")
    return path, make_reference(path)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case[0] != "write")) for case in SLICE],
    ids=" ".join,
)
def test_a_killed_run_goes_on_to_the_same_bytes(
    case: tuple[str, str], folder: tuple[Path, dict[str, bytes]]
) -> None:
    kill_and_resume(CASES.index(case), *folder)

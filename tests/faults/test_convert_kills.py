"""Tests one case of each format of ``tests.faults.convert_kills``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.campaign import corpus_folder
from tests.faults.convert_kills import FORMATS, Fixture, run_case, wrong_files


@pytest.fixture(scope="module")
def fixture() -> Iterator[Fixture]:
    with corpus_folder("convert_kills.") as folder:
        yield Fixture(folder)


def test_half_written_outputs_are_wrong() -> None:
    expected = {"config.json": "a", "model.safetensors": "b"}
    assert wrong_files({}, expected, "hf") == []
    assert wrong_files(expected, expected, "hf") == []
    assert wrong_files({"config.json": "a"}, expected, "hf") == ["model.safetensors"]
    assert wrong_files(expected | {"other": "c"}, expected, "hf") == ["other"]
    revisions = {"revisions.json": "x", "step_2/a": "1", "step_2/b": "2", "step_4/a": "3"}
    assert wrong_files({"revisions.json": "y", "step_4/a": "3"}, revisions, "every") == []
    assert wrong_files({"revisions.json": "y", "step_2/a": "1"}, revisions, "every") == ["step_2/b"]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(10, id="every", marks=pytest.mark.slow),
        *(
            pytest.param(case, id=name, marks=pytest.mark.nightly)
            for case, name in enumerate(FORMATS, start=len(FORMATS))
            if name != "every"
        ),
    ],
)
def test_killed_conversion_leaves_nothing(fixture: Fixture, case: int) -> None:
    found = run_case(fixture, case)
    assert found["ok"], found

"""Rank pools shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import RankPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool

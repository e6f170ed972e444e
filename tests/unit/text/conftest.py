"""A corpus with known duplicates."""

from pathlib import Path

import pytest

from tests.support.duplicates import make_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    return make_corpus(tmp_path)

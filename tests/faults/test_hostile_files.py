"""A small part of the campaign ``tests.faults.hostile_files``: changes of each kind of file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.hostile_files import Case, run_thousand
from tests.faults.hostile_kinds import KINDS, Kind


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_changed_files_are_read_or_refused(kind: Kind, tmp_path: Path) -> None:
    result = run_thousand(Case(kind, tmp_path), 100_000, 40)
    assert not result["failed"]
    assert result["read"] + result["refused"] == 40

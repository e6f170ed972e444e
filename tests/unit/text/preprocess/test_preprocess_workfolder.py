"""Claims of a work folder: what one process has, no other takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_deberta.text.preprocess.workfolder import WorkFolder, _state_and_start


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_claim_of_a_living_process_is_kept(tmp_path: Path, where: str) -> None:
    mine, other = (WorkFolder(str(tmp_path / "books")) for _ in range(2))
    mine.begin({"--input": [["a.jsonl", 1, 2]]})
    # The parent of this process, or one of another node.
    parent = f"{os.getppid()}-{_state_and_start(os.getppid())[1]}"
    host = mine._owner.rpartition(" ")[0] if where == "here" else where
    mine._owner = f"{host} {parent}"
    assert mine.claim("00000000-000000")
    assert not other.claim("00000000-000000")
    mine.release("00000000-000000")
    assert other.claim("00000000-000000")

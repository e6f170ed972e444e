"""The folder of real data, if the machine has one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def corpus_path(name: str) -> Path:
    """Return a file or folder of the corpus, or skip the test."""
    root = os.environ.get("MEGATRON_DEBERTA_CORPUS") or ROOT.parent / "shared" / "corpus"
    path = Path(root, name)
    if not path.exists():
        pytest.skip(f"{path} does not exist; set MEGATRON_DEBERTA_CORPUS")
    return path

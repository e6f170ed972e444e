"""A small corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.machine_text import documents


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Sixty documents as JSONL with two keys."""
    path = tmp_path / "corpus.jsonl"
    with path.open("w") as stream:
        for index, text in enumerate(documents()[:60]):
            stream.write(json.dumps({"id": index, "text": text, "title": f"Number {index}"}) + "\n")
    return str(path)

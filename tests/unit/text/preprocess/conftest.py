"""A small corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import Command
from tests.support.machine_text import documents


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Sixty documents as JSONL with two keys."""
    path = tmp_path / "corpus.jsonl"
    with path.open("w") as stream:
        for index, text in enumerate(documents()[:60]):
            stream.write(json.dumps({"id": index, "text": text, "title": f"Number {index}"}) + "\n")
    return str(path)


@pytest.fixture
def make_from(tokenizer_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """``preprocess`` to ``c``, without its ``--input``."""
    options = ["--tokenizer", tokenizer_dir, "--workers", "0", "--output", str(tmp_path / "c")]
    return Command(capsys, "preprocess", *options)


@pytest.fixture
def make(make_from: Command, corpus: str) -> Command:
    """``preprocess`` of the corpus to ``c``."""
    return make_from.with_options("--input", corpus)

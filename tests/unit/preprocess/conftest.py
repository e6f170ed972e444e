"""A small tokenizer and a small corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_deberta.tokenizer.training import train_sentencepiece
from tests.support.machine_text import documents


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("tokenizer") / "small")
    train_sentencepiece(documents()[:40], path, vocab_size=500)
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Sixty documents as JSONL with two keys."""
    path = tmp_path / "corpus.jsonl"
    with path.open("w") as stream:
        for index, text in enumerate(documents()[:60]):
            stream.write(json.dumps({"id": index, "text": text, "title": f"Number {index}"}) + "\n")
    return str(path)

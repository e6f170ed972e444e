"""A small tokenizer and a small corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from megatron_deberta.tokenizer.training import train_sentencepiece
from tests.support.machine_text import documents


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("tokenizer") / "small")
    train_sentencepiece(documents()[:40], path, vocab_size=500)
    return path


@pytest.fixture(scope="session")
def gpt2_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """``vocab.json`` and ``merges.txt`` as GPT-2 has them."""
    path = tmp_path_factory.mktemp("gpt2")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(documents(), trainer)
    backend.model.save(str(path))
    return str(path)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Sixty documents as JSONL with two keys."""
    path = tmp_path / "corpus.jsonl"
    with path.open("w") as stream:
        for index, text in enumerate(documents()[:60]):
            stream.write(json.dumps({"id": index, "text": text, "title": f"Number {index}"}) + "\n")
    return str(path)

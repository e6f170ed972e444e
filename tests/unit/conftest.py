"""Tokenizers shared by tests of several folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_deberta.tokenizer.training import train_sentencepiece
from tests.support.machine_text import documents


@pytest.fixture(scope="session")
def bpe_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train a SentencePiece BPE with byte fallback and the normalization of the released models."""
    path = str(tmp_path_factory.mktemp("tokenizers") / "bpe")
    train_sentencepiece(documents(), path, vocab_size=2000, model_type="bpe")
    return path


@pytest.fixture(scope="session")
def gpt2_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """``vocab.json`` and ``merges.txt`` as GPT-2 has them, with its one special token."""
    folder = tmp_path_factory.mktemp("gpt2")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(documents(), trainer)
    backend.model.save(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text())
    vocabulary["<|endoftext|>"] = len(vocabulary)
    Path(folder / "vocab.json").write_text(json.dumps(vocabulary))
    return str(folder)

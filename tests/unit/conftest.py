"""A tokenizer shared by tests of several folders."""

from __future__ import annotations

import pytest

from megatron_deberta.tokenizer.training import train_sentencepiece
from tests.support.machine_text import documents


@pytest.fixture(scope="session")
def bpe_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train a SentencePiece BPE with byte fallback and the normalization of the released models."""
    path = str(tmp_path_factory.mktemp("tokenizers") / "bpe")
    train_sentencepiece(documents(), path, vocab_size=2000, model_type="bpe")
    return path

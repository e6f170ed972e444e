"""A tokenizer that tests of several folders use."""

from __future__ import annotations

import pytest

from megatron_deberta.tokenizer.training import train_sentencepiece
from tests.support.machine_text import documents


@pytest.fixture(scope="session")
def bpe_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SentencePiece's byte pairs, bytes for unknown characters, normalized as the release's."""
    path = str(tmp_path_factory.mktemp("tokenizers") / "bpe")
    train_sentencepiece(documents(), path, vocab_size=2000, model_type="bpe")
    return path

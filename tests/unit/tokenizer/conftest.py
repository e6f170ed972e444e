"""A small tokenizer, trained once on text of the machine."""

from __future__ import annotations

import pytest

from megatron_deberta.tokenizer.training import train_sentencepiece
from tests.support.machine_text import documents


@pytest.fixture(scope="session")
def unigram_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("tokenizers") / "unigram")
    train_sentencepiece(documents(), path, vocab_size=2000)
    return path

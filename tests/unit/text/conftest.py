"""A small tokenizer, and a corpus with known duplicates."""

from pathlib import Path

import pytest

from megatron_deberta.tokenizer.training import train_sentencepiece
from tests.support.commands import Command
from tests.support.duplicates import make_corpus
from tests.support.machine_text import documents


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    return make_corpus(tmp_path)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("tokenizer") / "small")
    train_sentencepiece(documents()[:40], path, vocab_size=500)
    return path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run any command."""
    return Command(capsys)

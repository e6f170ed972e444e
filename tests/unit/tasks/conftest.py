"""Tokenizers of the tests of labelled tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_deberta.tokenizer import Tokenizer
from megatron_deberta.tokenizer.loading import load_tokenizer
from tests.support.tiny_models import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Return a SentencePiece tokenizer of 200 pieces."""
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """Return a byte-level BPE tokenizer."""
    return load_tokenizer(str(Path(__file__).parents[2] / "golden" / "byte_level.json"))

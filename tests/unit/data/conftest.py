"""Fixtures: small shards and a small vocabulary."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_deberta.data.shards.writer import write_shard as write_documents
from megatron_deberta.data.vocabulary import Vocabulary
from tests.support.commands import Command

VOCAB_SIZE = 200
NUM_TOKENS = 190
WriteShard = Callable[..., str]


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """Ids 0-3 and 189 special, 190-199 unused; every third ordinary id continues a word,
    unless it is a mark, as every third of these is."""
    return Vocabulary(
        size=VOCAB_SIZE,
        num_tokens=NUM_TOKENS,
        pad_id=0,
        cls_id=1,
        sep_id=2,
        mask_id=NUM_TOKENS - 1,
        special_ids=(0, 1, 2, 3, NUM_TOKENS - 1),
        word_starts=np.arange(VOCAB_SIZE) % 3 != 0,
        fingerprint="tiny",
        single_marks=np.arange(VOCAB_SIZE) % 9 == 0,
    )


@pytest.fixture
def write_shard(tmp_path: Path) -> WriteShard:
    """Write documents as a shard with a manifest; returns the prefix."""

    def write(
        documents: Sequence[np.ndarray | list[np.ndarray]],
        name: str = "shard",
        fingerprint: str = "tiny",
        vocab_size: int = VOCAB_SIZE,
    ) -> str:
        prefix = str(tmp_path / name)
        write_documents(
            prefix,
            documents,
            np.uint16,
            tokenizer_fingerprint=fingerprint,
            tokenizer_path="tokenizer-dir",
            vocab_size=vocab_size,
            sources=("text.jsonl",),
        )
        return prefix

    return write


@pytest.fixture
def random_documents() -> Callable[[int, int], list[np.ndarray]]:
    """Documents of random ordinary ids and of 1 to 59 tokens."""

    def draw(count: int, seed: int = 0) -> list[np.ndarray]:
        generator = np.random.default_rng(seed)
        return [
            generator.integers(4, NUM_TOKENS - 1, generator.integers(1, 60)) for _ in range(count)
        ]

    return draw


@pytest.fixture
def write_sentences(write_shard: WriteShard) -> Callable[..., str]:
    """Write a shard of so many documents of 1 to ``most`` sentences of 2 to 9 random ids."""

    def write(count: int, most: int = 11, name: str = "shard_sentence", seed: int = 0) -> str:
        draw = np.random.default_rng(seed)
        documents = [
            [
                draw.integers(4, NUM_TOKENS - 1, int(draw.integers(2, 10)))
                for _ in range(int(draw.integers(1, most + 1)))
            ]
            for _ in range(count)
        ]
        return write_shard(documents, name)

    return write


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run any command."""
    return Command(capsys)

"""The fast library for byte pairs gives the tokenizer's ids, or is not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_deberta.text.preprocess import encoding
from megatron_deberta.text.preprocess.pipeline import preprocess
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import find_sources
from megatron_deberta.tokenizer import load_tokenizer
from tests.support import machine_text
from tests.support.machine_text import documents
from tests.support.tiny_models import sentencepiece_model


@pytest.fixture(scope="module")
def plain_bpe_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SentencePiece's byte pairs without normalization: newlines are characters."""
    path = tmp_path_factory.mktemp("plain_bpe")
    model = sentencepiece_model(
        (line for text in documents() for line in text.splitlines()),
        model_type="bpe",
        vocab_size=2000,
        byte_fallback=True,
        normalization_rule_name="identity",
        control_symbols=["[MASK]"],
    )
    (path / "spm.model").write_bytes(model)
    return str(path)


@pytest.mark.parametrize("kind", ["gpt2_dir", "bpe_dir", "plain_bpe_dir"])
def test_fast_bpe_gives_the_tokenizers_ids(
    kind: str,
    corpus: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = request.getfixturevalue(kind)
    tokenizer = load_tokenizer(path)
    fast = encoding.fast_bpe_encoder(tokenizer)
    reference = tokenizer.encode_texts
    assert fast is not None
    hostile = [text for text in machine_text.hostile_lines(2000) if "\0" not in text]
    ends = ["", "a ", "", " ", "  ", "a\u00a0\n", "a \u0301", "a\u2581", "a\u2581 ", "\u2581", ""]
    for text in [*hostile, *ends]:
        assert encoding.agrees(fast, reference, [text]), ascii(text)
    assert encoding.agrees(fast, reference, [*documents(), *hostile, *ends, *documents()[:3]])
    sources = find_sources([corpus])
    assert encoding.choose_encoder(tokenizer, sources, ReadOptions()) != reference
    preprocess(sources, path, str(tmp_path / "fast"))
    monkeypatch.setattr(encoding, "fast_bpe_encoder", lambda *_: reference)
    preprocess(sources, path, str(tmp_path / "slow"))
    for end in ("bin", "idx"):
        fast_file, slow_file = (tmp_path / f"{run}_text_document.{end}" for run in ("fast", "slow"))
        assert fast_file.read_bytes() == slow_file.read_bytes()


def _grown_mib(fast: encoding.BatchEncoder, batches: int) -> list[int]:
    """Encode words that never come again; by how much the process has grown after each batch."""
    draw = np.random.default_rng(0)
    begin = encoding._resident_bytes()
    grown = []
    for _ in range(batches):
        letters = draw.integers(ord("a"), ord("z") + 1, 2 << 20, dtype=np.uint8)
        letters[::9] = ord(" ")
        fast([letters.tobytes().decode()])
        grown.append((encoding._resident_bytes() - begin) >> 20)
    return grown


@pytest.mark.slow
def test_words_without_end_take_bounded_memory(
    gpt2_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(gpt2_dir)
    fast = encoding.fast_bpe_encoder(tokenizer)
    assert fast is not None
    # The library's tables double as they grow, and loading takes some memory for a moment.
    monkeypatch.setattr(encoding, "CACHE_BYTES", 64 << 20)
    assert max(_grown_mib(fast, 24)) < 220
    assert encoding.agrees(fast, tokenizer.encode_texts, documents())
    # Without the bound it grows past that, so the test can fail.
    monkeypatch.setattr(encoding, "CACHE_BYTES", 1 << 40)
    assert max(_grown_mib(fast, 24)) > 280


def test_unigram_vocabularies_go_to_the_tokenizer(tokenizer_dir: str) -> None:
    assert encoding.fast_bpe_encoder(load_tokenizer(tokenizer_dir)) is None


def test_a_fast_library_that_differs_is_left(
    corpus: str, gpt2_dir: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(gpt2_dir)

    def wrong(texts: Any) -> Any:
        ids, lengths = tokenizer.encode_texts(texts)
        return np.flip(ids), lengths

    monkeypatch.setattr(encoding, "fast_bpe_encoder", lambda *_: wrong)
    chosen = encoding.choose_encoder(tokenizer, find_sources([corpus]), ReadOptions())
    assert chosen is not wrong
    assert "gives other ids" in caplog.text

"""Tokenizer training: settings, sampling, error messages, atomic publication."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.tokenizer import load_tokenizer
from megatron_deberta.tokenizer.training import split_lines, train_sentencepiece
from tests.support.machine_text import documents

TEXT = ["hello world, this is text", "more of the same text, the the"] * 20


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_too_large_vocabulary_names_one_that_works(model_type: str, tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    with pytest.raises(ConfigError, match="at most") as refusal:
        train_sentencepiece(TEXT, output, vocab_size=5000, model_type=model_type)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    found = re.search(r"use --vocab-size (\d+)", str(refusal.value))
    assert found is not None
    largest = int(found[1])
    tokenizer = train_sentencepiece(TEXT, output, vocab_size=largest, model_type=model_type)  # type: ignore[arg-type]
    assert tokenizer.mask_id == largest


def test_too_small_vocabulary_names_the_smallest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"alone need \d+ pieces"):
        train_sentencepiece(TEXT, str(tmp_path / "out"), vocab_size=8)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("texts", [[], ["", " \n "], ["\u200b"]])
def test_no_text_is_refused(texts: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="text"):
        train_sentencepiece(texts, str(tmp_path / "out"), vocab_size=100)
    assert list(tmp_path.iterdir()) == []


def test_rare_ascii_characters_are_pieces(tmp_path: Path) -> None:
    texts = [*documents(), "One ^ and one ` and 7 ~ and \u4e2d."]
    tokenizer = train_sentencepiece(texts, str(tmp_path / "out"), vocab_size=1000)
    used = {character for text in texts for character in text if "!" <= character <= "~"}
    unknown = {character for character in used if tokenizer.unk_id in tokenizer.encode(character)}
    assert unknown == set()
    assert tokenizer.unk_id in tokenizer.encode("\u4e2d")


def test_settings_out_of_range_are_refused(tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    with pytest.raises(ConfigError, match="--vocab-size 4"):
        train_sentencepiece(TEXT, output, vocab_size=4)
    with pytest.raises(ConfigError, match="--character-coverage 2"):
        train_sentencepiece(TEXT, output, vocab_size=40, character_coverage=2.0)


def test_error_in_the_input_is_the_error_that_is_seen(tmp_path: Path) -> None:
    def broken() -> object:
        yield from TEXT
        raise DataError("corpus.jsonl: line 7: not JSON")

    with pytest.raises(DataError, match="line 7"):
        train_sentencepiece(broken(), str(tmp_path / "out"), vocab_size=40)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_training_twice_gives_the_same_vocabulary(unigram_dir: str, tmp_path: Path) -> None:
    again = train_sentencepiece(documents(), str(tmp_path / "again"), vocab_size=2000)
    assert again.fingerprint == load_tokenizer(unigram_dir).fingerprint


def test_existing_output_is_replaced_only_when_forced(tmp_path: Path) -> None:
    output = tmp_path / "out"
    first = train_sentencepiece(TEXT, str(output), vocab_size=20)
    with pytest.raises(ConfigError, match="--force"):
        train_sentencepiece(TEXT, str(output), vocab_size=21)
    second = train_sentencepiece(TEXT, str(output), vocab_size=21, force=True)
    assert load_tokenizer(str(output)).fingerprint == second.fingerprint != first.fingerprint
    assert list(tmp_path.iterdir()) == [output]
    (output / "precious.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"precious\.txt"):
        train_sentencepiece(TEXT, str(output), vocab_size=22, force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        train_sentencepiece(TEXT, str(tmp_path / "file"), vocab_size=22, force=True)


def test_failed_replacement_brings_the_old_tokenizer_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    first = train_sentencepiece(TEXT, str(output), vocab_size=20)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(errno.EACCES, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Permission denied"):
        train_sentencepiece(TEXT, str(output), vocab_size=21, force=True)
    assert list(tmp_path.iterdir()) == [output]
    assert load_tokenizer(str(output)).fingerprint == first.fingerprint


def test_long_lines_are_cut_not_lost() -> None:
    text = "word " * 5000
    lines = [*split_lines(text), *split_lines("x" * 9000)]
    assert "".join(lines) == text + "x" * 9000
    assert max(map(len, lines)) <= 4096


@pytest.mark.parametrize("mark", ["\u0301", "\u093c"])
def test_long_lines_are_not_cut_before_a_mark(mark: str) -> None:
    text = "x" * 4095 + "q" + mark + "y" * 9
    lines = list(split_lines(text))
    assert lines == ["x" * 4095, "q" + mark + "y" * 9]


def test_lines_with_the_reserved_character_are_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SentencePiece's trainer would skip them and say nothing."""
    texts = ["usual words here"] * 20 + ["other \u2585 zebras"] * 20
    tokenizer = train_sentencepiece(texts, str(tmp_path / "tokenizer"), vocab_size=20)
    assert "20 of 40 lines" in caplog.text
    assert tokenizer.unk_id not in tokenizer.encode("zebras")
    with pytest.raises(DataError, match="no text besides U\\+2585"):
        train_sentencepiece(["\u2585"] * 3, str(tmp_path / "empty"), vocab_size=30)

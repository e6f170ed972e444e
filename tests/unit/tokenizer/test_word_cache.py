"""Cached words give the ids of the whole text, for any cache size."""

from __future__ import annotations

import json
import random
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from megatron_deberta.tokenizer import Tokenizer, load_tokenizer, word_cache
from tests.support.machine_text import hostile_lines, real_lines

LINES = [*real_lines(400), *hostile_lines(400)]


def reference_ids(folder: str, texts: list[str]) -> list[list[int]]:
    backend = Backend.from_file(f"{folder}/tokenizer.json")
    backend.encode_special_tokens = True
    return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]


def encode_together(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    ids, lengths = tokenizer.encode_texts(texts)
    return [part.tolist() for part in np.split(ids, lengths.cumsum()[:-1])]


def test_long_texts_are_cut_and_keep_their_ids(
    unigram_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_cache, "_MOST_CHARACTERS", 50)
    texts = [" ".join(LINES), " ".join(real_lines(200)), "w" * 500, "a b  " * 100, *LINES]
    tokenizer = load_tokenizer(unigram_dir)
    expected = reference_ids(unigram_dir, texts)
    assert encode_together(tokenizer, texts) == expected
    assert [tokenizer.encode(text) for text in texts[::7]] == expected[::7]


def test_characters_that_interact_across_spaces(unigram_dir: str) -> None:
    odd = [
        *[
            "",
            "\u0301",
            "\u0300e",
            "\u200d",
            "\u00ad",
            "\u0e33",
            "\u1100",
            "\ufeff",
            "\ufdfa",
            "\u00bd",
        ],
        *["\x00", "\x07", "\x0b", "\x0c", "\u0085", "\u2003", "\u2028", "\u202e", "\u0928\u092e"],
    ]
    words = [word for line in real_lines(300) for word in line.split()]
    draw = random.Random(0)

    def text(share: float) -> str:
        return "".join(
            draw.choice(["", " ", "  ", "\n", "\u00a0"])
            + draw.choice(odd if draw.random() < share else words)
            for _ in range(draw.randrange(10))
        )

    texts = [text(share) for share in (0.1, 0.5) for _ in range(4000)]
    tokenizer = load_tokenizer(unigram_dir)
    assert encode_together(tokenizer, texts) == reference_ids(unigram_dir, texts)


def test_small_cache_gives_the_same_ids(unigram_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "_MAX_WORDS", 60)
    monkeypatch.setattr(word_cache, "_MOST_CACHED_CHARACTERS", 1000)
    tokenizer = load_tokenizer(unigram_dir)
    long_words = [f"{number}{'x' * 300} and" for number in range(40)]
    texts = [*LINES[::2], *long_words, *LINES[:50]]
    assert [tokenizer.encode(text) for text in texts] == reference_ids(unigram_dir, texts)
    words = tokenizer._words._encoded_words()
    assert len(words._slots) < 200
    assert sum(map(len, words._slots)) < 2000
    assert words._ids.size < 5000


def test_freed_memory_is_returned_periodically(
    unigram_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(unigram_dir)
    give_back = Mock(wraps=word_cache._give_memory_back)
    monkeypatch.setattr(word_cache, "_give_memory_back", give_back)
    monkeypatch.setattr(word_cache, "_TRIM_CHARACTERS", 1000)
    given_back = []
    for _ in range(5):
        tokenizer.encode_texts(["some words " * 40])  # 440 characters
        given_back.append(give_back.call_count)
    assert given_back == [0, 0, 1, 1, 1]


def test_words_whose_beginning_has_no_piece(unigram_dir: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(unigram_dir, folder)
    (folder / "spm.model").unlink()
    spec = json.loads((folder / "tokenizer.json").read_text())
    for entry in spec["model"]["vocab"]:
        if entry[0] == "\u2581":
            entry[0] = "\ue000"
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.caches_words
    texts = ["the \u0180x and the \u0180 the", *LINES]
    found = encode_together(tokenizer, texts)
    assert tokenizer.unk_id in found[0]
    assert found == reference_ids(str(folder), texts)


@pytest.mark.parametrize("pattern", ["\\h+", "[[:alpha:]]x", "a{,2}b", "(?i:cls)"])
def test_patterns_with_another_meaning_in_python_disable_the_cache(
    unigram_dir: str, tmp_path: Path, pattern: str
) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(unigram_dir, folder)
    (folder / "spm.model").unlink()
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["pre_tokenizer"]["pretokenizers"][-1]["pattern"] = {"Regex": pattern}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert not load_tokenizer(str(folder)).caches_words
    assert load_tokenizer(unigram_dir).caches_words


def test_words_before_marks(unigram_dir: str) -> None:
    tokenizer = load_tokenizer(unigram_dir)
    words = dict.fromkeys(word.strip(".,;:!?") for text in real_lines(300) for word in text.split())
    marks = [".", ",", ";", ":", "!", "?", "..", "...", ".,", "?!", "!!!", '."', "'s.", "-", "--."]
    texts = [f"{word}{mark} {mark}{word}" for word in words for mark in marks]
    expected = reference_ids(unigram_dir, texts)
    assert encode_together(tokenizer, texts) == expected
    assert [tokenizer.encode(text) for text in texts[::37]] == expected[::37]


def test_threads_share_a_tokenizer(unigram_dir: str) -> None:
    """A cache that threads shared would lose words, or give one word's ids to another."""
    tokenizer = load_tokenizer(unigram_dir)
    expected = reference_ids(unigram_dir, LINES)
    begin = threading.Barrier(4)

    def encode(_: int) -> list[list[int]]:
        begin.wait()
        return [tokenizer.encode(line) for line in LINES]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for found in threads.map(encode, range(4)):
                assert found == expected
    finally:
        sys.setswitchinterval(interval)

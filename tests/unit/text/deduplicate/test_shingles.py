"""Hashes of word runs: what they are of, whatever the pieces; their values for ever."""

import random
import unicodedata

import numpy as np
import pytest

from megatron_deberta.text.deduplicate import shingles
from megatron_deberta.text.deduplicate.shingles import Shingler, digest_of
from megatron_deberta.text.deduplicate.sign import make_sketches
from tests.support.machine_text import HOSTILE_PIECES

MASK64 = (1 << 64) - 1


def mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK64
    return value ^ (value >> 31)


def spelt_out(text: str, ngram: int) -> list[int]:
    """One run after the other, with Python's integers."""
    words = unicodedata.normalize("NFC", text).lower().split()
    hashes = []
    for first in range(max(len(words) - ngram + 1, 1) if words else 0):
        run = " ".join(words[first : first + ngram]).encode("utf-8", "surrogatepass")
        value = 0
        for place, byte in enumerate(run):
            value += (byte + 1) * pow(0x9E3779B97F4A7C55, place, 1 << 64)
        hashes.append(mix(value & MASK64))
    return hashes


@pytest.mark.parametrize("seed", range(8))
def test_hashes_are_those_of_the_words_however_they_are_cut(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        monkeypatch.setattr(shingles, "_PIECE_CHARACTERS", draw.choice((3, 10, 50, 1 << 20)))
        monkeypatch.setattr(shingles, "_POWERS_BYTES", draw.choice((7, 64, 1 << 12)))
        ngram = draw.choice((1, 2, 5))
        words = [*HOSTILE_PIECES, "a", "B", "ΑΣ", "ß", " ", "\n", "\ud800", "word"]
        text = draw.choice(("", " ")).join(draw.choices(words, k=draw.choice((0, 1, 4, 30, 100))))
        _, hashes = Shingler(ngram)(text)
        assert hashes.tolist() == spelt_out(text, ngram)


@pytest.mark.parametrize("seed", range(8))
def test_many_texts_at_once_are_one_after_the_other(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(shingles, "_PIECE_CHARACTERS", draw.choice((10, 50, 1 << 20)))
    monkeypatch.setattr(shingles, "_SHORT_CHARACTERS", draw.choice((20, 100, 1 << 16)))
    monkeypatch.setattr(shingles, "_POWERS_BYTES", draw.choice((7, 64, 1 << 12)))
    shingler = Shingler(draw.choice((1, 2, 5)))
    words = [*HOSTILE_PIECES, "a", "B", " ", "\n", "word"]
    texts = [" ".join(draw.choices(words, k=draw.choice((0, 1, 3, 9, 40)))) for _ in range(60)]
    texts[draw.randrange(60)] = texts[0] = texts[-1] = " "
    for (digest, hashes), text in zip(shingler.many(texts), texts, strict=True):
        expected, one_by_one = shingler(text)
        assert digest == expected
        assert hashes.tolist() == one_by_one.tolist()
    assert shingler.many([]) == []


def test_digest_is_of_words_alone() -> None:
    shingler = Shingler(5)
    digest, _ = shingler("One  two\tTHREE")
    assert digest == shingler("\u2003one two\n\n three ")[0]
    assert digest != shingler("onetwo three")[0]
    assert digest == digest_of("ONE\ttwo three")
    assert digest_of(" ") == b""
    assert digest_of("Tiếng Việt") == digest_of(unicodedata.normalize("NFD", "Tiếng Việt"))
    assert len(digest) == 16
    assert shingler(" \n\u3000")[1].size == 0


def test_values_are_the_same_on_every_machine() -> None:
    """Sketches made on several machines or by several versions must fit together."""
    shingler = Shingler(5)
    digest, hashes = shingler("The quick brown fox jumps over the lazy dog")
    assert digest.hex() == "5bfb7372bdb2f169ed8c800e5ee441e8"
    assert [f"{value:016x}" for value in hashes[:2].tolist()] == [
        "630fcaa6831f356e",
        "6b6891d0f9e77ae5",
    ]
    (sketch,) = make_sketches([np.arange(0, 2**63, 2**52, np.uint64)], seed=1)
    assert sketch[:4].tolist() == [51899134, 184618313, 58007414, 7837287]


def test_sketches_estimate_jaccard() -> None:
    generator = np.random.default_rng(3)
    for share in (0.3, 0.7, 0.95):
        values = generator.integers(0, 2**63, 4000).astype(np.uint64)
        common = round(2000 * 2 * share / (1 + share))
        sets = [values[:2000], values[2000 - common : 4000 - common]]
        left, right = make_sketches(sets, seed=1)
        assert abs((left == right).mean() - common / (4000 - common)) < 0.15

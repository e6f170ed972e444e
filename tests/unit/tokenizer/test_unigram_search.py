"""``UnigramSearch`` gives the ids of ``tokenizers``."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace

from megatron_deberta.tokenizer import unigram_search
from megatron_deberta.tokenizer.unigram_search import SPACE_PIECE, UnigramSearch


def vocabulary(seed: int) -> list[tuple[str, float]]:
    """Pieces of few characters and fewer scores, so that many sums are equal or nearly so."""
    draw = random.Random(seed)
    letters = "abc\u00e9"
    pieces = {SPACE_PIECE, *letters}
    while len(pieces) < 60:
        piece = "".join(draw.choices(letters, k=draw.randint(1, 6)))
        pieces.add(draw.choice(["", SPACE_PIECE]) + piece)
    scores = [draw.choice([-1.0, -2.0, -3.0, -0.1, -0.2, -0.3, -7.7]) for _ in pieces]
    scored = list(zip(sorted(pieces), scores, strict=True))
    # None of these can be met in a word of the letters.
    return [("<unk>", 0.0), *scored, ("a\u4e00", -0.1), ("a" + SPACE_PIECE, -0.1), ("ab?", -0.1)]


@pytest.mark.parametrize("seed", range(20))
def test_ids_are_those_of_the_library(seed: int) -> None:
    pieces = vocabulary(seed)
    backend = Backend(Unigram(pieces, 0, False))
    backend.pre_tokenizer = Metaspace(prepend_scheme="always")
    search = UnigramSearch(pieces)
    assert search.characters == "abc\u00e9"
    draw = random.Random(seed)
    words = ["".join(draw.choices("aaabc\u00e9", k=draw.randint(1, 40))) for _ in range(500)]
    ids, sizes = search(words)
    expected = [backend.encode(word).ids for word in words]
    assert sizes.tolist() == [len(each) for each in expected]
    assert ids.tolist() == [token for each in expected for token in each]


def test_without_words_or_spaces() -> None:
    ids, sizes = UnigramSearch(vocabulary(0))([])
    assert (ids.size, sizes.size) == (0, 0)
    assert ids.dtype == np.int32
    assert UnigramSearch([("a", -1.0)]).characters == ""


def test_without_room_for_the_states_in_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unigram_search, "_STATE_BITS", np.uint64(8))
    assert UnigramSearch(vocabulary(0)).characters == ""

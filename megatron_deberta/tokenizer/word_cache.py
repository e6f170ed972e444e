"""Encodes word by word out of a cache, where that provably gives the ids of the whole text.

Owns the conditions and the cache. Refuses texts with characters that could interact across a
space; those take the long way.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_MAX_WORDS = 1 << 18
_MAX_WORD_LENGTH = 64
_INTERACTING = re.compile(r"[^\t\n\r -~\u00a0-\u00ac\u00ae-\u024f\u2010-\u2027\u2030-\u205e\u20ac]")
"""Anything but Latin letters, punctuation and the whitespace below: each of those is a grapheme
of its own, and the normalizer works grapheme by grapheme, so no word changes its neighbour."""
_WHITESPACE = "\t\n\r\u00a0"
"""What of the above ``str.split`` splits at, besides the space."""


def words_are_independent(spec: Mapping[str, Any]) -> bool:
    """Tell whether a ``tokenizer.json`` encodes words separated by spaces one by one.

    That holds where the text is normalized grapheme by grapheme, runs of spaces collapse, the
    metaspace splits words before the model sees them, and no added token is searched for.
    """
    normalizer = spec["normalizer"] or {}
    steps = normalizer.get("normalizers", [])
    replaced = [step.get("pattern") for step in steps if step["type"] == "Replace"]
    pre_tokenizer = spec["pre_tokenizer"] or {}
    first, *others = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return (
        bool(steps)
        and {step["type"] for step in steps} <= {"Precompiled", "Replace"}
        and replaced == [{"Regex": " {2,}"}, {"Regex": " \\z"}]
        and first.get("type") == "Metaspace"
        and first["prepend_scheme"] == "first"
        and first["split"] is True
        and all(other["type"] == "Split" for other in others)
        and all(token["special"] for token in spec["added_tokens"])
    )


class WordCache:
    """Ids of words met before.

    Args:
        encode: encodes a text the long way.
    """

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        """See the class."""
        self._words = _EncodedWords(encode)
        apart = encode("a b")
        # An identity normalizer keeps newlines as characters of their own.
        self._usable = all(encode(f"a{space}b") == apart for space in _WHITESPACE)

    def can_encode(self, text: str) -> bool:
        """Tell whether ``encode`` gives the ids of the long way."""
        return self._usable and _INTERACTING.search(text) is None

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return the ids of a text, int32 ``[tokens]``, read-only."""
        return np.frombuffer(b"".join(map(self._words.__getitem__, text.split())), np.int32)


class _EncodedWords(dict[str, bytes]):
    """Words to the bytes of their int32 ids, filled on demand up to a bound."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, word: str) -> bytes:
        # Several times faster than going through numpy, for the handful of ids of a word.
        ids = array("i", self._encode(word)).tobytes()
        if len(self) < _MAX_WORDS and len(word) <= _MAX_WORD_LENGTH:
            self[word] = ids
        return ids

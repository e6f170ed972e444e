"""Encodes word by word out of a cache, where that provably gives the ids of the whole text.

Owns the conditions and the cache. Refuses stretches of text with characters that could interact
across a space; those take the long way, from the word before to the word after.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute
from tokenizers import Tokenizer as Backend

_MAX_WORDS = 1 << 18
_SPACES = "\t\n\r \u00a0"
_OTHER_SPACES = "\x0b\x0c"
"""Which arrow splits at, and the normalizer may not."""
_LONE = "\t\n\r -~\u00a0-\u00ac\u00ae-\u024f\u2010-\u2027\u2030-\u205e\u20ac"
"""Latin letters, punctuation and whitespace: each of those is a grapheme of its own, and the
normalizer works grapheme by grapheme, so no word of theirs changes its neighbour."""
_INTERACTING = re.compile(f"[^{_LONE}]+")
_SPACE_PIECE = "\u2581"

Ids = npt.NDArray[np.int32]
Lengths = npt.NDArray[np.int64]


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
        backend: the tokenizer, special tokens not parsed.
        encode: encodes a text the long way.
    """

    def __init__(self, backend: Backend, encode: Callable[[str], list[int]]) -> None:
        """See the class."""
        self._encode = encode
        self._model = backend.model
        self._words = _EncodedWords(self._encode_word)
        apart = encode("a b")
        # An identity normalizer keeps newlines as characters of their own.
        self._usable = all(encode(f"a{space}b") == apart for space in _SPACES)
        unchanged = [
            character
            for character in map(chr, range(0x21, 0x2060))
            # A bracket may begin a special token's name, which the tokenizer takes apart.
            if not _INTERACTING.match(character)
            and character not in f"{_SPACES}["
            and backend.normalizer.normalize_str(character) == character
        ]
        self._unchanged = re.compile("[" + "".join(map(re.escape, unchanged)) + "]+")

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths] | None:
        """Encode texts; None where only the long way gives their ids.

        Returns:
            Ids of all texts one after the other, int32 ``[tokens]``, and how many each has,
            int64 ``[texts]``.
        """
        if not self._usable:
            return None
        try:
            ids, lengths, is_safe = self._encode_words(texts)
        except UnicodeEncodeError:  # a lone surrogate, which the long way names
            return None
        if is_safe.all():
            return ids, lengths
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for index in np.flatnonzero(~is_safe).tolist():
            parts[index] = self._encode_mixed(texts[index])
            lengths[index] = parts[index].size
        return np.concatenate(parts), lengths

    def _encode_mixed(self, text: str) -> Ids:
        """Encode a text of which some stretches go the long way."""
        stretches = list(_stretches(text))
        ids, lengths, _ = self._encode_words(
            ["" if is_long else each for each, is_long in stretches]
        )
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for index, (stretch, is_long) in enumerate(stretches):
            if is_long:
                parts[index] = np.asarray(self._encode(stretch), np.int32)
        return np.concatenate(parts)

    def _encode_words(self, texts: Sequence[str]) -> tuple[Ids, Lengths, npt.NDArray[np.bool_]]:
        """Encode texts word by word, and tell of which that gives the ids."""
        column = pyarrow.array(
            # A space to the normalizer but not to the splitting below.
            [text.replace("\u00a0", " ") for text in texts],
            pyarrow.large_string(),
        )
        lists = pyarrow.compute.ascii_split_whitespace(column)
        words = lists.values.dictionary_encode()
        codes = words.indices.to_numpy()
        starts, sizes, interacts = self._words.find(words.dictionary.to_pylist())
        sizes_of_words = sizes[codes]
        ends = np.zeros(codes.size + 1, np.int64)
        np.cumsum(sizes_of_words, out=ends[1:])
        # Each id's place in the cache: where its word begins there, and how far into it.
        places = np.repeat(starts[codes] - ends[:-1], sizes_of_words)
        places += np.arange(places.size)
        offsets = lists.offsets.to_numpy()
        is_safe = np.ones(len(texts), np.bool_)
        if interacts.any():
            owners = np.searchsorted(offsets, np.flatnonzero(interacts[codes]), side="right") - 1
            is_safe[owners] = False
        for index, text in enumerate(texts):
            if any(space in text for space in _OTHER_SPACES):
                is_safe[index] = False
        return self._words.ids[places], np.diff(ends[offsets]), is_safe

    def _encode_word(self, word: str) -> list[int] | None:
        if self._unchanged.fullmatch(word):
            # What is left of the pipeline: the word, marked as one, goes into the model.
            return [token.id for token in self._model.tokenize(_SPACE_PIECE + word)]
        if _INTERACTING.search(word):
            return None
        return self._encode(word) if word else []


def _stretches(text: str) -> Iterator[tuple[str, bool]]:
    """Cut a text at spaces into stretches of words, and those that go the long way (True)."""
    begin = end = word_end = 0
    for match in _INTERACTING.finditer(text):
        if match.start() < word_end:
            continue
        first = _word_begin(text, _word_begin(text, match.start(), end), end)
        word_end = _word_end(text, match.end())
        if first > end:
            if end:
                yield text[begin:end], True
            yield text[end:first], False
            begin = first
        end = _word_end(text, word_end)
    if end:
        yield text[begin:end], True
    yield text[end:], False


def _word_begin(text: str, position: int, least: int) -> int:
    """Go back over spaces, then to where that word begins."""
    while position > least and text[position - 1] in _SPACES:
        position -= 1
    while position > least and text[position - 1] not in _SPACES:
        position -= 1
    return position


def _word_end(text: str, position: int) -> int:
    """Go on over spaces, then to where that word ends."""
    while position < len(text) and text[position] in _SPACES:
        position += 1
    while position < len(text) and text[position] not in _SPACES:
        position += 1
    return position


class _EncodedWords:
    """Words to their ids, which lie one after the other in one array.

    Args:
        encode: encodes a word; None where that depends on its neighbours.

    Attributes:
        ids: of all words, int32.
    """

    def __init__(self, encode: Callable[[str], list[int] | None]) -> None:
        self._encode = encode
        self._slots: dict[str, int] = {}
        self._used = 0
        self.ids = np.zeros(0, np.int32)
        self._sizes = np.zeros(0, np.int64)
        self._starts = np.zeros(0, np.int64)
        self._uses = np.zeros(0, np.int32)
        self._interacts = np.zeros(0, np.bool_)
        self._fill([], np.zeros(0, np.int32))

    def find(self, words: list[str]) -> tuple[Lengths, Lengths, npt.NDArray[np.bool_]]:
        """Look different words up.

        Returns:
            Where in ``ids`` each begins, how many it has, and which depend on their neighbours.
        """
        if len(self._slots) + len(words) > _MAX_WORDS:
            self._forget()
        found = list(map(self._slots.get, words))
        unknown = [index for index, slot in enumerate(found) if slot is None]
        if unknown:
            self._add([words[index] for index in unknown])
            for index in unknown:
                found[index] = self._slots[words[index]]
        slots = np.array(found, np.int64)
        self._uses[slots] += 1
        return self._starts[slots], self._sizes[slots], self._interacts[slots]

    def _add(self, words: list[str]) -> None:
        encoded = [self._encode(word) for word in words]
        first = len(self._slots)
        self._slots.update(zip(words, range(first, first + len(words)), strict=True))
        sizes = np.fromiter((len(ids or ()) for ids in encoded), np.int64, len(encoded))
        new = np.fromiter((i for ids in encoded for i in ids or ()), np.int32, int(sizes.sum()))
        end = self._used + new.size
        if end > self.ids.size:
            self.ids = np.concatenate([self.ids, np.empty(end, np.int32)])
        self.ids[self._used : end] = new
        last = len(self._slots)
        if last > self._sizes.size:
            # One batch may have more words than are kept; they go with the next.
            more = last - self._sizes.size
            self._sizes = np.pad(self._sizes, (0, more))
            self._starts = np.pad(self._starts, (0, more))
            self._uses = np.pad(self._uses, (0, more))
            self._interacts = np.pad(self._interacts, (0, more))
        self._sizes[first:last] = sizes
        self._starts[first:last] = self._used + np.cumsum(sizes) - sizes
        self._interacts[first:last] = [ids is None for ids in encoded]
        self._used = end

    def _forget(self) -> None:
        """Keep the half of the words that were used most."""
        words = list(self._slots)
        order = np.argsort(-self._uses[: len(words)], kind="stable")[: _MAX_WORDS // 2]
        order.sort()
        kept = [words[slot] for slot in order]
        uses = self._uses[order] // 2
        self._slots.clear()
        self._fill(kept, uses)

    def _fill(self, words: list[str], uses: npt.NDArray[np.int32]) -> None:
        size = max(_MAX_WORDS, len(words))
        self.ids = np.empty(4 * _MAX_WORDS, np.int32)
        self._used = 0
        self._sizes = np.zeros(size, np.int64)
        self._starts = np.zeros(size, np.int64)
        self._uses = np.zeros(size, np.int32)
        self._interacts = np.zeros(size, np.bool_)
        if words:
            self._add(words)
            self._uses[: len(words)] = uses

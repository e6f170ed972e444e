"""Word-by-word encoding with a cache, where it provably gives the ids of the whole text.

Stretches of text with characters that could interact across a space are encoded whole, from the
word before to the word after.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute
from tokenizers import Tokenizer as Backend

from megatron_deberta.tokenizer.unigram_search import Ids, Lengths, UnigramSearch

# Words in the cache. With half as many, words of 77 MB of novels were evicted and met again.
_MAX_WORDS = 1 << 19
# Characters of text split into words at once; longer texts are cut.
_MOST_CHARACTERS = 1 << 23
_LONGEST_KEPT = 64
# Words whose ids are copied at once.
_GATHERED_WORDS = 1 << 16
# Characters of cached words beyond which the cache is reduced, however few words it has.
_MOST_CACHED_CHARACTERS = 1 << 24
_SPACES = "\t\n\r \u00a0"
_SPACES_AND_WORD = re.compile(f"[{_SPACES}]*[^{_SPACES}]*")
# Characters at which pyarrow splits, but the normalizer may not.
_OTHER_SPACES = "\x0b\x0c"
# Latin letters, punctuation and whitespace: each is its own grapheme, and the normalizer works
# grapheme by grapheme, so words of these characters do not change their neighbours.
_LONE = "\t\n\r -~\u00a0-\u00ac\u00ae-\u024f\u2010-\u2027\u2030-\u205e\u20ac"
_INTERACTING = re.compile(f"[^{_LONE}]+")
# Patterns with the same meaning in ``re`` and ``tokenizers``: names, alternatives, look-ahead.
_LITERALS = re.compile(r"(?:[^\\\[\](){}.*+?^$|]|\\\W|\||\(\?=|\))+")

# pyarrow's default pool keeps freed memory: 60 MB more per process.
_POOL = pyarrow.system_memory_pool()
_give_memory_back = _POOL.release_unused
# Characters after which freed memory is returned; the heap would grow with the corpus.
_TRIM_CHARACTERS = 1 << 25

_NO_IDS: Ids = np.empty(0, np.int32)


def words_are_independent(spec: Mapping[str, Any]) -> bool:
    """Tell whether a ``tokenizer.json`` encodes words separated by spaces independently.

    That is the case for a unigram model if text is normalized grapheme by grapheme, runs of spaces
    collapse, the metaspace splits words before the model, only names of special tokens are split
    after it, and no added token is searched for.
    """
    normalizer = spec["normalizer"] or {}
    steps = normalizer.get("normalizers", [])
    replaced = [step.get("pattern") for step in steps if step["type"] == "Replace"]
    first, *others = _pre_tokenizers(spec)
    return (
        spec["model"]["type"] == "Unigram"
        and bool(steps)
        and {step["type"] for step in steps} <= {"Precompiled", "Replace"}
        and replaced == [{"Regex": " {2,}"}, {"Regex": " \\z"}]
        and first.get("type") == "Metaspace"
        and first["prepend_scheme"] == "first"
        and first["split"] is True
        and len(others) <= 1
        and all(_is_literal(other.get("pattern", {})) for other in others)
        and all(other["behavior"] == "MergedWithPrevious" for other in others)
        and all(token["special"] for token in spec["added_tokens"])
    )


def _is_literal(pattern: Mapping[str, str]) -> bool:
    return _LITERALS.fullmatch(pattern.get("Regex", "")) is not None


def _pre_tokenizers(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    whole = spec["pre_tokenizer"] or {}
    steps: list[dict[str, Any]] = whole.get("pretokenizers", [whole])
    return steps


class WordCache:
    """Encoder of texts that caches the ids of words.

    Args:
        spec: content of a ``tokenizer.json`` whose words are independent.
        backend: its tokenizer, which does not parse special tokens.
        encode: encodes a whole text.
    """

    def __init__(
        self, spec: Mapping[str, Any], backend: Backend, encode: Callable[[str], list[int]]
    ) -> None:
        """See the class."""
        self._encode = encode
        self._encoder = _WordEncoder(spec, backend, encode)
        # One cache per thread: the threads of a Dask worker share the tokenizer.
        self._of_thread = threading.local()
        apart = encode("a b")
        self._characters = 0
        # An identity normalizer keeps newlines as characters.
        self._usable = all(encode(f"a{space}b") == apart for space in _SPACES)

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths] | None:
        """Encode texts; None: they must be encoded whole.

        Returns:
            Concatenated ids of all texts, int32 ``[tokens]``, and their number per text, int64
            ``[texts]``.
        """
        if not self._usable:
            return None
        self._characters += sum(map(len, texts))
        if self._characters >= _TRIM_CHARACTERS:
            self._characters = 0
            _give_memory_back()
        is_long = np.fromiter((len(text) > _MOST_CHARACTERS for text in texts), np.bool_)
        try:
            ids, lengths, is_safe = self._encode_words(
                ["" if long else text for text, long in zip(texts, is_long, strict=True)]
            )
            alone = np.flatnonzero(is_long | ~is_safe).tolist()
            if not alone:
                return ids, lengths
            parts = np.split(ids, np.cumsum(lengths)[:-1])
            for index in alone:
                parts[index] = np.concatenate([_NO_IDS, *self._encode_pieces(texts[index])])
                lengths[index] = parts[index].size
        except UnicodeEncodeError:  # a lone surrogate, which encoding the whole text reports
            return None
        return np.concatenate(parts), lengths

    def _encode_pieces(self, text: str) -> Iterator[Ids]:
        """Encode a text stretch by stretch, some of them whole, in bounded memory."""
        for stretch, is_long in _stretches(text):
            if is_long:
                yield np.asarray(self._encode(stretch), np.int32)
            else:
                for piece in _cut(stretch):
                    yield self._encode_words([piece])[0]

    def _encode_words(self, texts: Sequence[str]) -> tuple[Ids, Lengths, npt.NDArray[np.bool_]]:
        """Encode texts word by word; also return for which texts the ids are valid."""
        words, codes, offsets = _split(texts)
        cache = self._encoded_words()
        slots = cache.find(words)
        ids, ends = cache.gather(slots[codes])
        is_safe = np.ones(len(texts), np.bool_)
        interacts = cache.interacts[slots]
        if interacts.any():
            owners = np.searchsorted(offsets, np.flatnonzero(interacts[codes]), side="right") - 1
            is_safe[owners] = False
        for index, text in enumerate(texts):
            if any(space in text for space in _OTHER_SPACES):
                is_safe[index] = False
        return ids, np.diff(ends[offsets]), is_safe

    def _encoded_words(self) -> _EncodedWords:
        """Return the cache of the calling thread."""
        if not hasattr(self._of_thread, "words"):
            self._of_thread.words = _EncodedWords(self._encoder)
        words: _EncodedWords = self._of_thread.words
        return words


def _split(texts: Sequence[str]) -> tuple[list[str], npt.NDArray[np.int32], Lengths]:
    """Split texts at spaces.

    Returns:
        Unique words, the index of every word among them, int32 ``[words]``, and the first word
        of each text, int64 ``[texts + 1]``.
    """
    column = pyarrow.array(
        # A space to the normalizer but not to ascii_split_whitespace.
        [text.replace("\u00a0", " ") for text in texts],
        pyarrow.large_string(),
        memory_pool=_POOL,
    )
    lists = pyarrow.compute.ascii_split_whitespace(column, memory_pool=_POOL)
    words = pyarrow.compute.dictionary_encode(lists.values, memory_pool=_POOL)
    return words.dictionary.to_pylist(), words.indices.to_numpy(), lists.offsets.to_numpy()


def _cut(text: str) -> Iterator[str]:
    """Cut a text at spaces into pieces of bounded size, or of one word."""
    begin = 0
    while len(text) - begin > _MOST_CHARACTERS:
        end = text.rfind(" ", begin, begin + _MOST_CHARACTERS)
        if end <= begin and (end := text.find(" ", begin + _MOST_CHARACTERS)) < 0:
            break
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _stretches(text: str) -> Iterator[tuple[str, bool]]:
    """Cut a text at spaces into stretches; True: must be encoded whole."""
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
    """Return the beginning of the word before ``position``, skipping spaces."""
    while position > least and text[position - 1] in _SPACES:
        position -= 1
    while position > least and text[position - 1] not in _SPACES:
        position -= 1
    return position


def _word_end(text: str, position: int) -> int:
    """Return the end of the word after ``position``, skipping spaces."""
    match = _SPACES_AND_WORD.match(text, position)
    return match.end() if match else position


class _WordEncoder:
    """Encodes words that are not cached; arguments as for ``WordCache``."""

    def __init__(
        self, spec: Mapping[str, Any], backend: Backend, encode: Callable[[str], list[int]]
    ) -> None:
        self._encode = encode
        self.encode_plain = UnigramSearch(spec["model"]["vocab"])
        unchanged = "".join(
            character
            for character in self.encode_plain.characters
            if not _INTERACTING.match(character)
            and character not in _SPACES
            and backend.normalizer.normalize_str(character) == character
        )
        _, *guards = _pre_tokenizers(spec)
        apart = "".join(f"(?!.*(?:{guard['pattern']['Regex']}))" for guard in guards)
        pattern = f"{apart}[{re.escape(unchanged)}]{{1,{_LONGEST_KEPT}}}" if unchanged else "(?!)"
        # Whether the pipeline passes a word to the model unchanged.
        self.is_plain = re.compile(pattern).fullmatch

    def encode_other(self, words: Sequence[str]) -> tuple[Ids, Lengths, npt.NDArray[np.bool_]]:
        """Encode other words.

        Returns:
            As ``UnigramSearch``, and which words depend on their neighbours (they have no ids).
        """
        interacts = np.fromiter(map(bool, map(_INTERACTING.search, words)), np.bool_, len(words))
        ids, sizes = _join(
            [
                np.asarray([] if depends or not word else self._encode(word), np.int32)
                for word, depends in zip(words, interacts, strict=True)
            ]
        )
        return ids, sizes, interacts


def _join(parts: list[Ids]) -> tuple[Ids, Lengths]:
    return np.concatenate([_NO_IDS, *parts]), np.fromiter(map(len, parts), np.int64, len(parts))


class _EncodedWords:
    """Map from words to ids, which are stored in one array.

    Args:
        encoder: encodes missing words.

    Attributes:
        interacts: bool, which words depend on their neighbours.
    """

    def __init__(self, encoder: _WordEncoder) -> None:
        self._encoder = encoder
        self._clear()

    def _clear(self) -> None:
        self._slots: dict[str, int] = {}
        self._characters = 0
        self._ids = np.empty(4 * _MAX_WORDS, np.int32)
        self._used = 0
        self._sizes = np.zeros(_MAX_WORDS, np.int32)
        self._starts = np.zeros(_MAX_WORDS, np.int32)
        self._uses = np.zeros(_MAX_WORDS, np.int32)
        self.interacts = np.zeros(_MAX_WORDS, np.bool_)

    def find(self, words: list[str]) -> npt.NDArray[np.int32]:
        """Return the int32 slots of unique words; encode missing ones."""
        slots = self._slots_of(words)
        unknown = np.flatnonzero(slots < 0)
        if unknown.size:
            is_full = len(self._slots) + unknown.size > _MAX_WORDS
            if is_full or self._characters > _MOST_CACHED_CHARACTERS:
                self._evict()
                slots = self._slots_of(words)
                unknown = np.flatnonzero(slots < 0)
            new = [words[place] for place in unknown.tolist()]
            is_plain = np.fromiter(
                (match is not None for match in map(self._encoder.is_plain, new)),
                np.bool_,
                len(new),
            )
            plain = list(itertools.compress(new, is_plain))
            slots[unknown[is_plain]] = self._add(plain, *self._encoder.encode_plain(plain))
            others = list(itertools.compress(new, ~is_plain))
            slots[unknown[~is_plain]] = self._add(others, *self._encoder.encode_other(others))
        self._uses[slots] += 1
        return slots

    def gather(self, slots: npt.NDArray[np.integer[Any]]) -> tuple[Ids, Lengths]:
        """Concatenate the ids of words.

        Returns:
            Ids, int32 ``[tokens]``, and 0 followed by the end of each word, int64 ``[words + 1]``.
        """
        ends = np.zeros(slots.size + 1, np.int64)
        np.cumsum(self._sizes[slots], out=ends[1:])
        ids = np.empty(ends[-1], np.int32)
        # In chunks: the indices take several times the memory of the ids.
        for begin in range(0, slots.size, _GATHERED_WORDS):
            some = slots[begin : begin + _GATHERED_WORDS]
            first, last = ends[begin], ends[begin + some.size]
            shifts = self._starts[some] - ends[begin : begin + some.size]
            places = np.repeat(shifts, self._sizes[some]) + np.arange(first, last)
            ids[first:last] = self._ids[places]
        return ids, ends

    def _slots_of(self, words: list[str]) -> npt.NDArray[np.int32]:
        """Return the slot of each word; -1: not cached."""
        return np.fromiter(map(self._slots.get, words, itertools.repeat(-1)), np.int32, len(words))

    def _add(
        self,
        words: list[str],
        ids: Ids,
        sizes: npt.NDArray[np.integer[Any]],
        interacts: npt.NDArray[np.bool_] | bool = False,
    ) -> Lengths:
        """Add missing words; return their slots."""
        first = len(self._slots)
        self._slots.update(zip(words, range(first, first + len(words)), strict=True))
        self._characters += sum(map(len, words))
        end = self._used + ids.size
        if end > self._ids.size:
            self._ids = np.concatenate([self._ids, np.empty(end, np.int32)])
        self._ids[self._used : end] = ids
        last = len(self._slots)
        if last > self._sizes.size:
            # One batch may have more words than the cache; the next one evicts them.
            more = last - self._sizes.size
            self._sizes = np.pad(self._sizes, (0, more))
            self._starts = np.pad(self._starts, (0, more))
            self._uses = np.pad(self._uses, (0, more))
            self.interacts = np.pad(self.interacts, (0, more))
        self._sizes[first:last] = sizes
        self._starts[first:last] = self._used + np.cumsum(sizes) - sizes
        self.interacts[first:last] = interacts
        self._used = end
        return np.arange(first, last)

    def _evict(self) -> None:
        """Evict long words and all but the most used half."""
        words = list(self._slots)
        uses = self._uses[: len(words)]
        uses[np.fromiter(map(len, words), np.int64, len(words)) > _LONGEST_KEPT] = 0
        kept = np.argsort(-uses, kind="stable")[: min(_MAX_WORDS // 2, np.count_nonzero(uses))]
        kept.sort()
        sizes, interacts, uses = self._sizes[kept], self.interacts[kept], uses[kept] // 2
        ids, _ = self.gather(kept)
        self._clear()
        self._add([words[slot] for slot in kept], ids, sizes, interacts)
        self._uses[: uses.size] = uses

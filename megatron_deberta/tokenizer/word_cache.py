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
from tokenizers.pre_tokenizers import Metaspace

from megatron_deberta.tokenizer.charsmap import without_separators
from megatron_deberta.tokenizer.special_tokens import SPACE_PIECE

Ids = npt.NDArray[np.int32]
Lengths = npt.NDArray[np.int64]

# Words in the cache. With half as many, words of 77 MB of novels were evicted and met again.
_MAX_WORDS = 1 << 19
# Characters of a text after which it is cut.
_MOST_CHARACTERS = 1 << 23
_LONGEST_KEPT = 64
# New words that the library encodes at once; more are not faster.
_WORDS_AT_ONCE = 1 << 9
# Words whose ids are copied at once.
_GATHERED_WORDS = 1 << 16
# Characters of cached words beyond which the cache is reduced, however few words it has.
_MOST_CACHED_CHARACTERS = 1 << 24
_SPACES = "\t\n\r \u00a0"
_NO_BREAK_SPACE = "\u00a0".encode()
_TO_SPACE = bytes.maketrans(b"\t\n\r", b"   ")
# Latin letters and punctuation: each is its own grapheme, and the normalizer works
# grapheme by grapheme, so words of these characters do not change their neighbours.
_LONE = "!-~\u00a1-\u00ac\u00ae-\u024f\u2010-\u2027\u2030-\u205e\u20ac"
_INTERACTING = re.compile(f"[^{_LONE}{_SPACES}]")
# A space between words of lone characters.
_CUT = re.compile(f"(?<![^{_SPACES}])[{_LONE}]+ (?=[{_LONE}]+(?![^{_SPACES}]))")
# Patterns with the same meaning in ``re`` and ``tokenizers``: names, alternatives, look-ahead.
_LITERALS = re.compile(r"(?:[^\\\[\](){}.*+?^$|]|\\\W|\||\(\?=|\))+")

# pyarrow's default pool keeps freed memory: 60 MB more per process.
_POOL = pyarrow.system_memory_pool()
_give_memory_back = _POOL.release_unused
# Characters after which freed memory is returned; the heap would grow with the corpus.
_TRIM_CHARACTERS = 1 << 25

_NO_IDS: Ids = np.empty(0, np.int32)


def words_are_independent(spec: Mapping[str, Any]) -> bool:
    """Return whether a ``tokenizer.json`` encodes words separated by spaces independently.

    That is the case for a unigram model if text is normalized grapheme by grapheme, runs of spaces
    collapse, the metaspace splits words before the model, only names of special tokens are split
    after it, and no added token is searched for.
    """
    normalizer = without_separators(spec["normalizer"]) or {}
    steps = normalizer.get("normalizers", [])
    replaced = [step.get("pattern") for step in steps if step["type"] == "Replace"]
    first, *others = _pre_tokenizers(spec)
    return (
        spec["model"]["type"] == "Unigram"
        and bool(steps)
        and {step["type"] for step in steps} <= {"NFC", "Precompiled", "Replace"}
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
        try:
            if max(map(len, texts), default=0) <= _MOST_CHARACTERS:
                return self._encode_words(texts)
            return _join(
                [
                    np.concatenate([self._encode_words([piece])[0] for piece in _cut(text)])
                    for text in texts
                ]
            )
        except UnicodeEncodeError:  # a lone surrogate, which encoding the whole text reports
            return None

    def _encode_words(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Encode texts word by word, and words that change their neighbours together with them."""
        data, words, first_words = _split(texts)
        unique = pyarrow.compute.dictionary_encode(words, memory_pool=_POOL)
        codes = unique.indices.to_numpy()
        cache = self._encoded_words()
        slots = cache.find(unique.dictionary.to_pylist())
        ids, ends = cache.of_words(slots)
        ids, ends = _take(ids, ends[codes], np.diff(ends)[codes])
        lengths = np.diff(ends[first_words])
        interacts = cache.interacts[slots]
        if not interacts.any():
            return ids, lengths
        parts, done = [], 0
        offsets = np.frombuffer(words.buffers()[1], np.int64)
        for text, first, last in _stretches(interacts[codes], offsets, first_words):
            stretch = data[offsets[first] : offsets[last + 1] - 1].decode()
            found = np.asarray(self._encode(stretch), np.int32)
            parts += [ids[done : ends[first]], found]
            done = ends[last + 1]
            lengths[text] += found.size - (done - ends[first])
        return np.concatenate([*parts, ids[done:]]), lengths

    def _encoded_words(self) -> _EncodedWords:
        """Return the cache of the calling thread."""
        if not hasattr(self._of_thread, "words"):
            self._of_thread.words = _EncodedWords(self._encoder)
        words: _EncodedWords = self._of_thread.words
        return words


def _split(texts: Sequence[str]) -> tuple[bytes, pyarrow.LargeStringArray, Lengths]:
    """Split texts into words that keep the space after them.

    Returns:
        The texts in UTF-8, each followed by a newline; their words, of which some are only a
        space, with the same byte offsets; the first word of each text, int64 ``[texts + 1]``.
    """
    encoded = [text.encode() for text in texts]
    sizes = np.fromiter(map(len, encoded), np.int64, len(texts)) + 1
    original = b"\n".join([*encoded, b""])
    del encoded
    data = original.replace(_NO_BREAK_SPACE, b"  ").translate(_TO_SPACE)
    spaces = np.flatnonzero(np.frombuffer(data, np.uint8) == ord(" "))
    offsets = np.concatenate([[0], spaces + 1])
    first_words = np.searchsorted(offsets, np.concatenate([[0], np.cumsum(sizes)]))
    words = pyarrow.LargeStringArray.from_buffers(
        spaces.size, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)
    )
    return original, words, first_words


def _cut(text: str) -> Iterator[str]:
    """Cut a text between words that do not change their neighbours."""
    begin = 0
    while match := _CUT.search(text, begin + _MOST_CHARACTERS):
        yield text[begin : match.end()]
        begin = match.end()
    yield text[begin:]


def _stretches(
    interacts: npt.NDArray[np.int32], offsets: Lengths, first_words: Lengths
) -> Iterator[tuple[int, int, int]]:
    """Find the ranges of words that must be encoded together.

    A range holds the words with interacting characters and one neighbour on either side.

    Args:
        interacts: ``[words]``, which contain such characters.
        offsets: int64 ``[words + 1]``, bytes before each word.
        first_words: int64 ``[texts + 1]``, the first word of each text.

    Yields:
        Text, first word, last word.
    """
    centres = np.flatnonzero(interacts)
    texts = np.searchsorted(first_words, centres, side="right") - 1
    filled = np.flatnonzero(np.diff(offsets) > 1)
    places = np.searchsorted(filled, centres)
    first = np.where(places > 0, filled[places - 1], 0)
    first = np.maximum(first, first_words[texts])
    last = np.append(filled, interacts.size)[places + 1]
    last = np.minimum(last, first_words[texts + 1] - 1)
    is_apart = first[1:] > last[:-1]
    begins = np.concatenate([[True], is_apart])
    ends = np.concatenate([is_apart, [True]])
    yield from zip(texts[begins].tolist(), first[begins].tolist(), last[ends].tolist(), strict=True)


class _WordEncoder:
    """Encodes words that are not cached, each with a space after it; arguments as ``WordCache``."""

    def __init__(
        self, spec: Mapping[str, Any], backend: Backend, encode: Callable[[str], list[int]]
    ) -> None:
        self._encode = encode
        pieces = [piece for piece, _ in spec["model"]["vocab"]]
        self._begins_word = np.array([piece.startswith(SPACE_PIECE) for piece in pieces])
        # The model itself, which is not copied, without normalization.
        self._model = Backend(backend.model)
        self._model.pre_tokenizer = Metaspace(prepend_scheme="always")
        # A word of pieces has no unknown character, and begins with the piece of a space.
        unchanged = "".join(
            piece
            for piece in sorted(set(pieces) if SPACE_PIECE in pieces else ())
            if re.fullmatch(f"[{_LONE}]", piece)
            and backend.normalizer.normalize_str(piece) == piece
        )
        _, *guards = _pre_tokenizers(spec)
        apart = "".join(f"(?!.*(?:{guard['pattern']['Regex']}))" for guard in guards)
        pattern = f"{apart}[{re.escape(unchanged)}]{{1,{_LONGEST_KEPT}}} " if unchanged else "(?!)"
        # Whether the pipeline passes a word to the model unchanged.
        self.is_plain = re.compile(pattern).fullmatch

    def encode_plain(self, words: Sequence[str]) -> tuple[Ids, Lengths]:
        """Encode words for which ``is_plain`` holds; return their ids, and how many each has."""
        parts = [_NO_IDS]
        for first in range(0, len(words), _WORDS_AT_ONCE):
            text = "".join(words[first : first + _WORDS_AT_ONCE])[:-1]
            (found,) = self._model.encode_batch_fast([text], add_special_tokens=False)
            parts.append(np.array(found.ids, np.int32))
        ids = np.concatenate(parts)
        begins = np.flatnonzero(self._begins_word[ids])
        return ids, np.diff(begins, append=ids.size)

    def encode_other(self, words: Sequence[str]) -> tuple[Ids, Lengths, npt.NDArray[np.bool_]]:
        """Encode other words.

        Returns:
            Ids, their number per word, and which words depend on their neighbours: these have no
            ids.
        """
        interacts = np.fromiter(map(bool, map(_INTERACTING.search, words)), np.bool_, len(words))
        ids, sizes = _join(
            [
                np.asarray([] if depends or word == " " else self._encode(word[:-1]), np.int32)
                for word, depends in zip(words, interacts, strict=True)
            ]
        )
        return ids, sizes, interacts


def _join(parts: list[Ids]) -> tuple[Ids, Lengths]:
    return np.concatenate([_NO_IDS, *parts]), np.fromiter(map(len, parts), np.int64, len(parts))


def _take(
    ids: Ids, starts: npt.NDArray[np.integer[Any]], sizes: npt.NDArray[np.integer[Any]]
) -> tuple[Ids, Lengths]:
    """Concatenate the ids of words.

    Args:
        ids: int32, of all words.
        starts: ``[words]``, where the ids of each word begin in ``ids``.
        sizes: ``[words]``, how many they are.

    Returns:
        Ids, int32 ``[tokens]``, and 0 followed by the end of each word, int64 ``[words + 1]``.
    """
    ends = np.zeros(starts.size + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    found = np.empty(ends[-1], np.int32)
    # In chunks: the indices take several times the memory of the ids.
    for begin in range(0, starts.size, _GATHERED_WORDS):
        some = slice(begin, begin + _GATHERED_WORDS)
        first, last = ends[begin], ends[min(begin + _GATHERED_WORDS, starts.size)]
        places = np.repeat(starts[some] - ends[:-1][some], sizes[some])
        places += np.arange(first, last)
        np.take(ids, places, out=found[first:last], mode="clip")
    return found, ends


class _EncodedWords:
    """Map from words to ids, which are stored in one array.

    Args:
        encoder: encodes missing words.

    Attributes:
        interacts: int32, by slot: 1 for a word that depends on its neighbours, else 0.
    """

    def __init__(self, encoder: _WordEncoder) -> None:
        self._encoder = encoder
        self._clear()

    def _clear(self) -> None:
        self._slots: dict[str, int] = {}
        self._characters = 0
        self._ids = np.empty(4 * _MAX_WORDS, np.int32)
        self._used = 0
        self._set_columns(np.zeros((4, _MAX_WORDS), np.int32))

    def _set_columns(self, columns: npt.NDArray[np.int32]) -> None:
        """Use [4, slots] columns: size, start, uses, and if a word depends on its neighbours."""
        self._columns = columns
        self._sizes, self._starts, self._uses, self.interacts = columns

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

    def of_words(self, slots: npt.NDArray[np.integer[Any]]) -> tuple[Ids, Lengths]:
        """Return the ids of words, and 0 followed by the end of each word in them."""
        return _take(self._ids, self._starts[slots], self._sizes[slots])

    def _slots_of(self, words: list[str]) -> npt.NDArray[np.int32]:
        """Return the slot of each word; -1: not cached."""
        return np.fromiter(map(self._slots.get, words, itertools.repeat(-1)), np.int32, len(words))

    def _add(
        self,
        words: list[str],
        ids: Ids,
        sizes: npt.NDArray[np.integer[Any]],
        interacts: npt.NDArray[Any] | bool = False,
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
            self._set_columns(np.pad(self._columns, ((0, 0), (0, last - self._sizes.size))))
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
        ids, _ = self.of_words(kept)
        self._clear()
        self._add([words[slot] for slot in kept], ids, sizes, interacts)
        self._uses[: uses.size] = uses

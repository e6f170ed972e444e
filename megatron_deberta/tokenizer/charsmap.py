"""Exact longest-match normalization of SentencePiece, in steps that ``tokenizers`` has.

SentencePiece replaces, from left to right, the longest sequence of characters that has a rule:
``e`` and an acute accent become ``é``, ``①`` becomes ``1`` and an accent after it stays. The step
``Precompiled`` of ``tokenizers`` looks up whole grapheme clusters of fewer than six bytes, takes
the *shortest* rule and drops the rest of the cluster; longer clusters are never composed. So

1. a separator is inserted behind each longest match that a mark or another character that may
   compose follows;
2. a second separator is inserted before every other mark, so that each character is its own
   cluster, and ``Precompiled`` replaces characters one by one;
3. the second separator is removed, NFC composes what is left together, the first is removed.

The separators are pairs of Unicode's noncharacters, which no text has. Where no sequence with a
rule and no mark behind a single rule occurs, ``Precompiled`` alone is exact, which
``PlainTextCheck`` finds out at a fraction of the cost.
"""

from __future__ import annotations

import base64
import functools
import logging
import re
import struct
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, normalizers

from megatron_deberta.hashing import finalize_array

logger = logging.getLogger(__name__)

_MATCH_END, _CLUSTER_CUT = "\ufdda\U0008fffe", "\ufddb\U0009fffe"
# Characters that belong to the grapheme cluster of the character before them: marks, the joiners,
# SARA AM of Thai and Lao, half-width voicing marks, and marks that Unicode 16 and 17 added.
MARKS = (
    r"\p{M}\x{E33}\x{EB3}\x{200C}\x{200D}\x{FF9E}\x{FF9F}"
    r"\x{897}\x{CF3}\x{ECE}\x{1ACF}-\x{1ADD}\x{1AE0}-\x{1AEB}"
)
_HANGUL = (range(0x1100, 0x1200), range(0x3131, 0x3190), range(0xAC00, 0xD7B0))
_HALFWIDTH_HANGUL = range(0xFFA0, 0xFFDD)
_BMP_END, _CODE_POINTS = 0x10000, 0x110000
# Classes of characters that are told apart; the last one stands for all others.
_MOST_CLASSES = 255
# The mark of the last combining class but one, behind which other marks do not stay.
_LAST_MARK = "\u0345"
# Where at least one of so many characters may be a second one, all are looked up.
_DENSE = 4
# Texts for which a call of numpy takes longer than a search.
_SHORT_CHARACTERS = 256
# Characters that are checked at once.
_CHECKED_CHARACTERS = 1 << 20

Units = npt.NDArray[np.uint32]


def longest_match_normalizer(charsmap: bytes) -> list[normalizers.Normalizer]:
    """Return the steps that normalize as SentencePiece does with a precompiled map.

    Args:
        charsmap: ``precompiled_charsmap`` of a SentencePiece model, not empty.

    Raises:
        ValueError: the map is damaged.
    """
    sequences, seconds = _patterns(charsmap)
    following = f"[{MARKS}{seconds}]"
    match = rf"(?>{sequences}|[\s\S])" if sequences else r"[\s\S]"
    return [
        normalizers.Replace(Regex(rf"(?=[\s\S]{following}){match}\K"), _MATCH_END),
        normalizers.Replace(
            # Not at the beginning of a text, where the library cannot insert.
            Regex(rf"(?<=[^{_MATCH_END[-1]}])(?=[{MARKS}])|(?<=\r)(?=\n)"),
            _CLUSTER_CUT,
        ),
        normalizers.Precompiled(charsmap),
        normalizers.Replace(_CLUSTER_CUT, ""),
        normalizers.NFC(),
        normalizers.Replace(_MATCH_END, ""),
    ]


def without_separators(normalizer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the normalizer of a ``tokenizer.json`` without the steps that correct the library.

    What is left determines the ids of text that has no sequence with a rule, and is what versions
    before these steps wrote.
    """
    if not is_longest_match(normalizer):
        return normalizer
    assert normalizer is not None
    steps = normalizer["normalizers"]
    at = next(index for index, step in enumerate(steps) if step["type"] == "Precompiled")
    kept = [*steps[: at - 2], steps[at], *steps[at + 4 :]]
    return {**normalizer, "normalizers": kept}


def is_longest_match(normalizer: Mapping[str, Any] | None) -> bool:
    """Return whether a normalizer has the steps of ``longest_match_normalizer``."""
    steps = (normalizer or {}).get("normalizers", [])
    return any(step.get("content") == _MATCH_END for step in steps)


class PlainTextCheck:
    """Tells for which texts ``Precompiled`` alone gives what ``longest_match_normalizer`` gives.

    Those have no two neighbours of which the first begins a rule that the second continues, or has
    a rule by itself and is followed by a mark.

    Args:
        normalizer: of a ``tokenizer.json``, with the steps of ``longest_match_normalizer``.
    """

    def __init__(self, normalizer: Mapping[str, Any]) -> None:
        """See the class."""
        step = next(each for each in normalizer["normalizers"] if each["type"] == "Precompiled")
        self._pairs = _pairs(base64.b64decode(step["precompiled_charsmap"]))
        near = "".join(sorted(each for each in self._pairs.seconds if ord(each) < _BMP_END))
        # Far characters one by one would be compared one by one.
        self._may_follow = re.compile(f"[{re.escape(near)}\U00010000-\U0010ffff]").search

    def __call__(self, text: str) -> bool:
        """Tell whether a text is of this kind."""
        if "\r\n" in text:
            return False
        if text.isascii():
            return True
        if len(text) < _SHORT_CHARACTERS and not self._may_follow(text):
            return True
        return all(
            self._is_plain(text[begin : begin + _CHECKED_CHARACTERS + 1])
            for begin in range(0, len(text), _CHECKED_CHARACTERS)
        )

    def _is_plain(self, text: str) -> bool:
        pairs = self._pairs
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        is_high = codes >= pairs.least_second
        if _DENSE * np.count_nonzero(is_high) < codes.size:
            places = np.flatnonzero(is_high)
            places = places[pairs.second_class[codes[places]] > 0]
        else:
            places = np.flatnonzero(pairs.second_class[codes])
        if not places.size:
            return True
        # What is before the first character is of no class.
        firsts = pairs.first_class[codes[places - 1]] * (places > 0)
        return not pairs.is_pair[firsts, pairs.second_class[codes[places]]].any()


class _Pairs(NamedTuple):
    """Pairs of characters that ``Precompiled`` cannot be given.

    Attributes:
        seconds: characters that are the second of a pair.
        least_second: the smallest of their code points.
        first_class: class of each code point as first character, uint8.
        second_class: class of each code point as second character, uint8; 0: of no pair.
        is_pair: which classes are a pair, bool ``[first classes, second classes]``.
    """

    seconds: frozenset[str]
    least_second: int
    first_class: npt.NDArray[np.uint8]
    second_class: npt.NDArray[np.uint8]
    is_pair: npt.NDArray[np.bool_]


@functools.cache
def _marks() -> frozenset[str]:
    """Return all characters of ``MARKS``, of the Unicode version of ``tokenizers``."""
    is_mark = np.ones(_CODE_POINTS, np.bool_)
    is_mark[0xD800:0xE000] = False  # Surrogates are no characters.
    everything = np.flatnonzero(is_mark).astype("<u4").tobytes().decode("utf-32-le")
    others = normalizers.Replace(Regex(f"[{MARKS}]"), "").normalize_str(everything)
    is_mark[np.frombuffer(others.encode("utf-32-le"), np.uint32)] = False
    return frozenset(map(chr, np.flatnonzero(is_mark)))


@functools.lru_cache(maxsize=4)
def _pairs(charsmap: bytes) -> _Pairs:
    trie, marks = _trie(charsmap), _marks()
    firsts: dict[tuple[int, bool], list[int]] = defaultdict(list)
    followers: dict[tuple[int, bool], frozenset[str]] = {}
    for character, state in trie.characters(trie.root):
        key = trie.identity(state), trie.is_end(state)
        firsts[key].append(ord(character))
        if key not in followers:
            following = frozenset(each for each, _ in trie.characters(state))
            followers[key] = following | marks if key[1] else following
    kept = [key for key in firsts if followers[key]]
    first_class = np.zeros(_CODE_POINTS, np.uint8)
    for number, key in enumerate(kept, 1):
        first_class[firsts[key]] = min(number, _MOST_CLASSES)
    members: dict[tuple[bool, ...], list[str]] = defaultdict(list)
    for character in frozenset().union(*followers.values()):
        members[tuple(character in followers[key] for key in kept)].append(character)
    second_class = np.zeros(_CODE_POINTS, np.uint8)
    is_pair = np.zeros((_MOST_CLASSES + 1, _MOST_CLASSES + 1), np.bool_)
    for number, (follows, characters) in enumerate(members.items(), 1):
        second_class[list(map(ord, characters))] = min(number, _MOST_CLASSES)
        for first in (np.flatnonzero(follows) + 1).tolist():
            is_pair[min(first, _MOST_CLASSES), min(number, _MOST_CLASSES)] = True
    # Whatever is before them.
    unlike = _composed_otherwise(trie, marks)
    second_class[list(map(ord, unlike))] = _MOST_CLASSES
    is_pair[:, _MOST_CLASSES] = True
    seconds = frozenset(unlike).union(*followers.values())
    return _Pairs(seconds, min(map(ord, seconds)), first_class, second_class, is_pair)


def _composed_otherwise(trie: _Trie, marks: Iterable[str]) -> set[str]:
    """Return characters for which the library's NFC is not Python's: their Unicode differs."""
    compose = normalizers.NFC().normalize_str
    found = {
        mark
        for mark in marks
        if compose(_LAST_MARK + mark) != unicodedata.normalize("NFC", _LAST_MARK + mark)
    }
    for character, state in trie.characters(trie.root):
        if ord(character) < _BMP_END:
            continue
        for rest, value in trie.rules(state):
            if rest and compose(character + rest) != unicodedata.normalize("NFC", character + rest):
                found.update(value)
    return found


@functools.lru_cache(maxsize=4)
def _patterns(charsmap: bytes) -> tuple[str, str]:
    """Return a pattern of all sequences with a rule, and a class of their further characters."""
    trie = _trie(charsmap)
    firsts: dict[int, list[str]] = defaultdict(list)
    for character, state in trie.characters(trie.root):
        firsts[trie.identity(state)].append(character)
    states = {trie.identity(state): state for _, state in trie.characters(trie.root)}
    seconds: set[str] = set()
    alternatives = []
    for identity, state in states.items():
        if rest := trie.pattern(state, seconds):
            alternatives.append(_class(firsts[identity]) + rest)
    _warn_of_rules(trie)
    return "|".join(sorted(alternatives)), _ranges(seconds)


def _warn_of_rules(trie: _Trie) -> None:
    """Warn of rules for sequences that are no composition, which the steps cannot apply.

    Not checked: Hangul, for its 200,000 rules, and scripts beyond the basic plane, some of which
    are newer than the library's NFC.
    """
    compose = normalizers.NFC().normalize_str
    single = {
        character: trie.value(state)
        for character, state in trie.characters(trie.root)
        if trie.is_end(state)
    }
    other = []
    for character, state in trie.characters(trie.root):
        if _is_hangul(character) or ord(character) >= _BMP_END:
            continue
        for rest, value in trie.rules(state):
            sequence = character + rest
            if rest and compose("".join(single.get(each, each) for each in sequence)) != value:
                other.append((sequence, value))
    if other:
        sequence, value = other[0]
        logger.warning(
            "warning: %d of the SentencePiece model's rules, such as %a to %a, replace sequences "
            "that are no composed character; they are not applied, so text with these sequences "
            "gets other ids than SentencePiece's",
            len(other), sequence, value,
        )  # fmt: skip


def _is_hangul(character: str) -> bool:
    code = ord(character)
    return code in _HALFWIDTH_HANGUL or any(code in part for part in _HANGUL)


class _Trie:
    """Double-array trie of a precompiled map (Darts-clone), over UTF-8 bytes.

    A state is the index of the unit that was reached, as in ``common_prefix_search``.
    """

    def __init__(self, charsmap: bytes) -> None:
        if len(charsmap) < 4 or (size := struct.unpack("<I", charsmap[:4])[0]) % 4:
            raise ValueError("its precompiled_charsmap is damaged")
        if not 4 <= size <= len(charsmap) - 4:
            raise ValueError("its precompiled_charsmap is damaged")
        self._units: Units = np.frombuffer(charsmap, np.uint32, size // 4, 4)
        self._texts = charsmap[4 + size :]
        units = self._units.astype(np.int64)
        self._offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
        self._ends = (units >> 8) & 1 == 1
        labels = units & (1 << 31 | 0xFF)
        self.root = 0
        # A unit with a label belongs to the state whose children begin at its index without it.
        places = np.flatnonzero((labels > 0) & (labels < 256))
        bases = places ^ labels[places]
        order = np.argsort(bases, kind="stable")
        self._places, self._labels = places[order], labels[places[order]]
        self._bases = bases[order]
        self._identities = self._identify()
        self._known: dict[int, str] = {}

    def _children(self, state: int) -> Iterator[tuple[int, int]]:
        base = state ^ int(self._offsets[state])
        first, last = np.searchsorted(self._bases, [base, base + 1])
        yield from zip(
            self._labels[first:last].tolist(), self._places[first:last].tolist(), strict=True
        )

    def _identify(self) -> npt.NDArray[np.uint64]:
        """Number the states such that equal numbers have equal continuations, as hashes."""
        levels, parents = [np.array([self.root])], [np.empty(0, np.int64)]
        while levels[-1].size:
            states = levels[-1]
            bases = states ^ self._offsets[states]
            first = np.searchsorted(self._bases, bases)
            counts = np.searchsorted(self._bases, bases, side="right") - first
            owners = np.repeat(np.arange(states.size), counts)
            at = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(owners.size)
            levels.append(self._places[at])
            parents.append(owners)
            if len(levels) > self._units.size:
                raise ValueError("its precompiled_charsmap is damaged")
        labels = (self._units & 0xFF).astype(np.uint64)
        hashes = np.zeros(self._units.size, np.uint64)
        for states, owners, above in zip(
            levels[:0:-1], parents[:0:-1], levels[-2::-1], strict=True
        ):
            hashes[states] += self._ends[states].astype(np.uint64) * np.uint64(0x632BE59BD9B4E019)
            mixed = finalize_array(hashes[states] * np.uint64(257) + labels[states])
            sums = np.zeros(above.size, np.uint64)
            np.add.at(sums, owners, mixed)
            hashes[above] = sums
        return hashes

    def identity(self, state: int) -> int:
        """Return a number that states with equal continuations share."""
        return int(self._identities[state])

    def is_end(self, state: int) -> bool:
        """Tell whether a rule ends here."""
        return bool(self._ends[state])

    def value(self, state: int) -> str:
        """Return what the rule that ends here writes."""
        at = int(self._units[state ^ int(self._offsets[state])] & ((1 << 31) - 1))
        return self._texts[at : self._texts.index(b"\0", at)].decode()

    def characters(self, state: int) -> Iterator[tuple[str, int]]:
        """Yield the characters that follow, and the state behind each."""
        stack = [(b"", state)]
        while stack:
            before, here = stack.pop()
            for label, child in self._children(here):
                content = before + bytes([label])
                size = 1 if content[0] < 0x80 else 2 + (content[0] >= 0xE0) + (content[0] >= 0xF0)
                if len(content) == size:
                    yield content.decode(), child
                else:
                    stack.append((content, child))

    def rules(self, state: int) -> Iterator[tuple[str, str]]:
        """Yield what follows until a rule ends, and what it writes."""
        if self.is_end(state):
            yield "", self.value(state)
        for character, child in self.characters(state):
            for rest, value in self.rules(child):
                yield character + rest, value

    def pattern(self, state: int, characters: set[str]) -> str:
        """Return a pattern of what must follow to complete a longer rule; empty: nothing can.

        Args:
            state: after one character or more.
            characters: gets all characters that may follow.
        """
        identity = self.identity(state)
        if identity in self._known:
            return self._known[identity]
        groups: dict[str, list[str]] = defaultdict(list)
        for character, child in self.characters(state):
            rest = self.pattern(child, characters)
            groups[f"(?:{rest})?" if rest and self.is_end(child) else rest].append(character)
        for group in groups.values():
            characters.update(group)
        parts = sorted(_class(group) + rest for rest, group in groups.items())
        pattern = parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})" if parts else ""
        self._known[identity] = pattern
        return pattern


@functools.lru_cache(maxsize=1)
def _trie(charsmap: bytes) -> _Trie:
    return _Trie(charsmap)


def _class(characters: Iterable[str]) -> str:
    return f"[{_ranges(characters)}]"


def _ranges(characters: Iterable[str]) -> str:
    """Return the inside of a character class."""
    codes = np.array(sorted(map(ord, characters)), np.int64)
    runs = np.split(codes, np.flatnonzero(np.diff(codes) > 1) + 1)
    return "".join(
        rf"\x{{{run[0]:X}}}" + (rf"-\x{{{run[-1]:X}}}" if run.size > 1 else "")
        for run in runs
        if run.size
    )

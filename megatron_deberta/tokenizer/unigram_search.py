"""Viterbi search of a unigram model over many words at once.

Gives the ids of ``tokenizers`` exactly: float64 scores are added in the same order. Only words
whose characters are all pieces are supported, so the rules for unknown characters are not needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SPACE_PIECE = "\u2581"
_CHARACTERS = ord(SPACE_PIECE) + 1
# Words per batch; larger batches are not faster and take more memory.
_WORDS_AT_ONCE = 1 << 13
# Multiplier of the hash.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)
# Bits of the target state of an edge; the bits above hold the key (state, code), 24 + 14 bits.
_STATE_BITS = np.uint64(24)
_STATE = np.uint64((1 << 24) - 1)

Ids = npt.NDArray[np.int32]
Lengths = npt.NDArray[np.int64]


class UnigramSearch:
    """Finds the segmentation into pieces with the largest sum of scores.

    Args:
        vocabulary: pieces and scores by id.

    Attributes:
        characters: characters that words may contain, each of which is a piece. Empty if the space
            is not a piece or the vocabulary is too large.

    Source: Kudo, "Subword Regularization" (2018), section 3.2.
    """

    def __init__(self, vocabulary: Sequence[tuple[str, float]]) -> None:
        """See the class."""
        pieces = [piece for piece, _ in vocabulary]
        self._scores = np.array([score for _, score in vocabulary])
        is_single = {piece for piece in pieces if len(piece) == 1 and piece <= SPACE_PIECE}
        self.characters = "".join(sorted(is_single - {SPACE_PIECE}))
        # A trie has at most as many states as its pieces have characters.
        if SPACE_PIECE not in is_single or sum(map(len, pieces)) >> int(_STATE_BITS):
            self.characters = ""
        # Small codes, so that a state and a code fit into one key; 0: in no piece.
        self._codes = np.zeros(_CHARACTERS, np.uint64)
        known = [ord(character) for character in self.characters + SPACE_PIECE]
        self._codes[known] = np.arange(1, len(known) + 1)
        self._width = np.uint64(len(known) + 1)
        if self.characters:
            self._build(pieces)

    def _build(self, pieces: Sequence[str]) -> None:
        """Build the trie: a table from (state, code) to state, and each state's piece."""
        known = set(self.characters)
        # Words contain a space only at the beginning.
        usable = {
            index: piece
            for index, piece in enumerate(pieces)
            if piece and known.issuperset(piece.removeprefix(SPACE_PIECE))
        }
        ids = np.fromiter(usable, np.int32)
        matrix = np.array(list(usable.values()))
        lengths = np.char.str_len(matrix)
        codes = self._codes[matrix.view(np.uint32).reshape(ids.size, -1)]
        states, count = np.zeros(ids.size, np.uint64), 1
        keys, ends = [], [np.full(1, -1, np.int32)]
        self._depth = int(lengths.max(initial=0))
        for depth in range(self._depth):
            longer = lengths > depth
            codes, lengths, ids = codes[longer], lengths[longer], ids[longer]
            edges, children = np.unique(
                states[longer] * self._width + codes[:, depth], return_inverse=True
            )
            keys.append(edges)
            end = np.full(edges.size, -1, np.int32)
            is_end = lengths == depth + 1
            end[children[is_end]] = ids[is_end]
            ends.append(end)
            states = (count + children).astype(np.uint64)
            count += edges.size
        self._pieces = np.concatenate(ends)
        self._hash(np.concatenate(keys))

    def _hash(self, keys: npt.NDArray[np.uint64]) -> None:
        """Build the hash table of edges, with open addressing; states are counted from 1."""
        bits = int(2 * keys.size).bit_length()
        self._shift, self._last = np.uint64(64 - bits), np.uint64((1 << bits) - 1)
        self._edges = np.zeros(1 << bits, np.uint64)
        edges = (keys << _STATE_BITS) + np.arange(1, keys.size + 1, dtype=np.uint64)
        slots = (keys * _FACTOR) >> self._shift
        while edges.size:
            is_free = self._edges[slots] == 0
            self._edges[slots[is_free]] = edges[is_free]
            is_left = self._edges[slots] != edges
            edges, slots = edges[is_left], (slots[is_left] + _ONE) & self._last

    def _next(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return the target states of edges; 0: no such edge."""
        slots = (keys * _FACTOR) >> self._shift
        edges = self._edges[slots]
        states: npt.NDArray[np.uint64] = edges & _STATE
        others = np.flatnonzero((edges >> _STATE_BITS != keys) & (edges != 0))
        states[edges >> _STATE_BITS != keys] = 0
        while others.size:
            slots[others] = (slots[others] + _ONE) & self._last
            edges = self._edges[slots[others]]
            found = edges >> _STATE_BITS == keys[others]
            states[others[found]] = edges[found] & _STATE
            others = others[~found & (edges != 0)]
        return states

    def __call__(self, words: Sequence[str]) -> tuple[Ids, Lengths]:
        """Encode words of at most 60,000 ``characters``, each as if preceded by a space.

        Returns:
            Concatenated ids, int32 ``[tokens]``, and their number per word.
        """
        parts = [
            self._search(words[first : first + _WORDS_AT_ONCE])
            for first in range(0, len(words), _WORDS_AT_ONCE)
        ]
        if not parts:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        ids, counts = zip(*parts, strict=True)
        return np.concatenate(ids), np.concatenate(counts)

    def _search(self, words: Sequence[str]) -> tuple[Ids, Lengths]:
        text = SPACE_PIECE + SPACE_PIECE.join(words)
        codes = self._codes[np.frombuffer(text.encode("utf-32-le"), np.uint32)]
        lengths = np.fromiter(map(len, words), np.int64, len(words)) + 1
        begins = np.cumsum(lengths) - lengths
        offsets = np.arange(codes.size) - np.repeat(begins, lengths)
        starts, sizes, pieces = self._matches(codes)
        # Edges in the order of their starts, as in ``tokenizers``: the first of equal sums wins.
        # Edges of one start end at different nodes.
        order = np.argsort(offsets[starts].astype(np.uint16), kind="stable")
        starts, sizes, pieces = starts[order], sizes[order], pieces[order]
        # One node before each character, and one after the last.
        word_of = np.repeat(np.arange(len(words)), lengths)
        tails, scores = starts + word_of[starts], self._scores[pieces]
        heads = tails + sizes
        first_nodes = begins + np.arange(len(words))
        best = np.full(codes.size + len(words), -np.inf)
        best[first_nodes] = 0.0
        through = np.zeros(best.size, np.int64)
        ends = np.cumsum(np.bincount(offsets[starts]))
        for begin, end in itertools.pairwise([0, *ends.tolist()]):
            sums = best[tails[begin:end]] + scores[begin:end]
            better = np.flatnonzero(sums > best[heads[begin:end]]) + begin
            best[heads[better]] = sums[better - begin]
            through[heads[better]] = better
        return _follow(first_nodes, lengths, through, sizes, pieces)

    def _matches(self, codes: npt.NDArray[np.uint64]) -> tuple[Lengths, Lengths, Ids]:
        """Find all pieces at all positions: their positions, lengths and ids."""
        padded = np.concatenate([codes, np.zeros(self._depth, np.uint64)])
        places, states, found = np.arange(codes.size), np.zeros_like(codes), []
        for depth in range(self._depth):
            states = self._next(states * self._width + padded[places + depth])
            alive = np.flatnonzero(states)
            places, states = places[alive], states[alive]
            pieces = self._pieces[states]
            hits = np.flatnonzero(pieces >= 0)
            found.append((places[hits], np.full(hits.size, depth + 1), pieces[hits]))
        starts, sizes, pieces = (np.concatenate(part) for part in zip(*found, strict=True))
        return starts, sizes, pieces


def _follow(
    first_nodes: Lengths, lengths: Lengths, through: Lengths, sizes: Lengths, pieces: Ids
) -> tuple[Ids, Lengths]:
    """Follow the best edges back from the end of each word."""
    words, nodes = np.arange(lengths.size), first_nodes + lengths
    counts, steps = np.zeros(lengths.size, np.int64), []
    while words.size:
        edges = through[nodes]
        steps.append((words, counts[words], pieces[edges]))
        counts[words] += 1
        nodes = nodes - sizes[edges]
        on = nodes > first_nodes[words]
        words, nodes = words[on], nodes[on]
    ids, last = np.empty(counts.sum(), np.int32), np.cumsum(counts) - 1
    for word, back, piece in steps:
        ids[last[word] - back] = piece
    return ids, counts

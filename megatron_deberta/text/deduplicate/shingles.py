"""64-bit hashes of the runs of n lower-cased words of a document, computed on arrays in pieces.

The hash is a polynomial in the bytes of the run modulo 2^64 with an odd base, mixed at the end.
It depends on the text only, not on the machine, the process or a library's version.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from megatron_deberta.hashing import finalize_array

Hashes = npt.NDArray[np.uint64]

_PIECE_CHARACTERS = 1 << 20
_SHORT_CHARACTERS = 1 << 16
_TOGETHER_CHARACTERS = 1 << 18
_WHITESPACE = re.compile(r"\s")
_MASK64 = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C55
_INVERSE = pow(_BASE, -1, 1 << 64)
_POWERS_BYTES = 1 << 20


def digest_of(text: str) -> bytes:
    """Return the 16-byte digest of a text's lower-cased words with single spaces between them.

    A text without words has none: ``b""``.
    """
    digest = hashlib.blake2b(digest_size=16)
    separator = b""
    for piece in _normalised_pieces(text):
        digest.update(separator + piece)
        separator = b" "
    return digest.digest() if separator else b""


class Shingler:
    """Normalises texts and hashes their runs of words.

    Args:
        ngram: words in a run.
    """

    def __init__(self, ngram: int) -> None:
        """See the class."""
        self._ngram = ngram
        self._powers = _powers(_BASE)
        self._inverses = _powers(_INVERSE)

    def __call__(self, text: str) -> tuple[bytes, Hashes]:
        """Look at one text.

        Args:
            text: as read.

        Returns:
            The 16-byte digest of its lower-cased words with single spaces between them, and the
            [runs] uint64 hashes of its runs of words in order, with repetitions. A text of fewer
            words is one run; a text without words has none.
        """
        digest = hashlib.blake2b(digest_size=16)
        runs: list[Hashes] = []
        # Prefix sums at the words' begins, not yet used up, and the inverse power at each.
        begins = np.empty(0, np.uint64)
        scales = np.empty(0, np.uint64)
        carry, power, inverse = 0, 1, 1
        end = carry
        words = 0
        for piece in _normalised_pieces(text):
            content = piece if not words else b" " + piece
            digest.update(content)
            at_begins, at_scales, at_ends, carry, power, inverse = self._sums(
                content, not words, carry, power, inverse
            )
            begins = np.concatenate([begins, at_begins])
            scales = np.concatenate([scales, at_scales])
            words += len(at_ends)
            end = int(at_ends[-1])
            # The first begin waiting belongs to a run that ends in this piece, or later.
            first = self._ngram - 1 - (len(begins) - len(at_ends))
            ends = at_ends[max(first, 0) :]
            if len(begins) >= self._ngram and len(ends):
                runs.append(finalize_array((ends - begins[: len(ends)]) * scales[: len(ends)]))
                begins, scales = begins[len(ends) :], scales[len(ends) :]
        if 0 < words < self._ngram:
            runs.append(finalize_array((np.uint64(end) - begins[:1]) * scales[:1]))
        return digest.digest(), np.concatenate(runs) if runs else np.empty(0, np.uint64)

    def many(self, texts: Sequence[str]) -> list[tuple[bytes, Hashes]]:
        """Look at several texts; the same as one after the other, and faster if they are short."""
        results: list[tuple[bytes, Hashes]] = []
        short: list[bytes] = []
        size = 0
        for text in texts:
            if len(text) > _SHORT_CHARACTERS:
                results += [*self._all_at_once(short), self(text)]
                short, size = [], 0
                continue
            short.append(b" ".join(_normalised_pieces(text)))
            size += len(text)
            if size >= _TOGETHER_CHARACTERS:
                results += self._all_at_once(short)
                short, size = [], 0
        return results + self._all_at_once(short)

    def _all_at_once(self, contents: Sequence[bytes]) -> list[tuple[bytes, Hashes]]:
        """Hash the runs of normalised texts, laid end to end."""
        digests = [hashlib.blake2b(content, digest_size=16).digest() for content in contents]
        words = np.array([content.count(b" ") + 1 if content else 0 for content in contents])
        if not words.any():
            return [(digest, np.empty(0, np.uint64)) for digest in digests]
        joined = b" ".join(content for content in contents if content)
        begins, scales, ends, *_ = self._sums(joined, True, 0, 1, 1)
        last_words = np.repeat(np.cumsum(words) - 1, words)
        first_words = np.repeat(np.cumsum(words) - words, words)
        word = np.arange(len(begins))
        last_of_run = np.minimum(word + self._ngram - 1, last_words)
        # Of a text's last words no run begins, but that of a text of few words.
        is_run = (word + self._ngram - 1 <= last_words) | (word == first_words)
        hashes = finalize_array((ends[last_of_run[is_run]] - begins[is_run]) * scales[is_run])
        runs = np.where(words, np.maximum(words - self._ngram + 1, 1), 0)
        return list(zip(digests, np.split(hashes, np.cumsum(runs)[:-1]), strict=True))

    def _sums(
        self, content: bytes, is_first: bool, carry: int, power: int, inverse: int
    ) -> tuple[Hashes, Hashes, Hashes, int, int, int]:
        """Return prefix sums at the begins (with inverse powers) and ends of a piece's words.

        ``power`` and ``inverse`` are the base's powers at the piece's first byte, ``carry`` the
        sum before it.
        """
        begins, scales, ends = [], [], []
        if is_first:
            begins.append(np.array([carry], np.uint64))
            scales.append(np.array([inverse], np.uint64))
        for offset in range(0, len(content), _POWERS_BYTES):
            part = np.frombuffer(
                content, np.uint8, min(_POWERS_BYTES, len(content) - offset), offset
            )
            # One more than the byte, so that no byte adds nothing.
            sums = (part.astype(np.uint64) + np.uint64(1)) * self._powers[: len(part)]
            np.cumsum(sums, out=sums)
            sums *= np.uint64(power)
            sums += np.uint64(carry)
            spaces = np.flatnonzero(part == ord(" "))
            before = np.concatenate([np.array([carry], np.uint64), sums])
            ends.append(before[spaces])
            begins.append(sums[spaces])
            scales.append(self._inverses[spaces + 1] * np.uint64(inverse))
            carry = int(sums[-1])
            power = power * pow(_BASE, len(part), 1 << 64) & _MASK64
            inverse = inverse * pow(_INVERSE, len(part), 1 << 64) & _MASK64
        ends.append(np.array([carry], np.uint64))
        if not is_first:
            # The first space ends the word that the piece before it has already ended.
            ends[0] = ends[0][1:]
        return (
            np.concatenate(begins),
            np.concatenate(scales),
            np.concatenate(ends),
            carry,
            power,
            inverse,
        )


def _normalised_pieces(text: str) -> Iterator[bytes]:
    """Cut a text between words and return the pieces' lower-cased words with single spaces, in NFC.

    A composed and a decomposed copy of a text are the same text.
    """
    begin = 0
    while begin < len(text):
        end = begin + _PIECE_CHARACTERS
        if end < len(text):
            gap = _WHITESPACE.search(text, end)
            end = gap.start() if gap else len(text)
        # Returned as it is where a quick check finds nothing to compose.
        words = unicodedata.normalize("NFC", text[begin:end]).lower().split()
        if words:
            yield " ".join(words).encode("utf-8", "surrogatepass")
        begin = end


def _powers(base: int) -> Hashes:
    powers = np.full(_POWERS_BYTES + 1, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)

"""Encoders of many texts at once: gigatoken for byte pairs, and SentencePiece's own library.

Whether gigatoken gives the tokenizer's ids must be checked with ``agrees`` on some of the text.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from megatron_deberta.errors import ConfigError
from megatron_deberta.tokenizer.tokenizer import Tokenizer

Ids = npt.NDArray[np.generic]
Lengths = npt.NDArray[np.int64]
# Texts to the ids of all of them one after the other, and how many each has.
BatchEncoder = Callable[[Sequence[str]], tuple[Ids, Lengths]]

_SPACE_PIECE = "\u2581"
# How far a process may grow over the words that a fast library keeps.
CACHE_BYTES = 1 << 27


class _BytePairs:
    """gigatoken in bounded memory.

    It keeps every word it has met (version 0.10; its issue 36), which on text of a terabyte is
    more than any machine has. Where that grows beyond ``CACHE_BYTES`` it is loaded anew, which
    takes a twentieth of a second and changes no id.

    Args:
        spec: content of a ``tokenizer.json``.
        dtype: of the ids.

    Raises:
        Exception: whatever the library raises where it cannot read that.
    """

    def __init__(self, spec: str, dtype: np.dtype[Any]) -> None:
        self._spec = spec
        self._dtype = dtype
        self._load()

    def _load(self) -> None:
        import gigatoken

        self._library: Any = None
        self._library = gigatoken.Tokenizer.from_json(self._spec)
        self._least_bytes = _resident_bytes()

    def __call__(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        # What a text takes while it is read comes and goes; the least stays, as the cache does.
        now = _resident_bytes()
        self._least_bytes = min(self._least_bytes, now)
        if now - self._least_bytes > CACHE_BYTES:
            self._load()
        # One by one: a call for many is no faster, and imports awkward arrays: 0.2 s.
        parts = [self._library.encode(text) for text in texts]
        ids = np.concatenate(
            [np.empty(0, self._dtype), *parts], dtype=self._dtype, casting="same_kind"
        )
        return ids, np.fromiter(map(len, parts), np.int64, len(parts))


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * mmap.PAGESIZE


def fast_bpe_encoder(tokenizer: Tokenizer, dtype: npt.DTypeLike = np.int32) -> BatchEncoder | None:
    """Return gigatoken's encoder of a byte-pair vocabulary; None if it cannot read it.

    Args:
        tokenizer: decides the ids.
        dtype: of the ids.
    """
    spec = tokenizer.spec
    if spec["model"]["type"] != "BPE":
        return None
    # Special tokens in a corpus are text, so the library must not know them.
    normalizer = tokenizer.plain_normalizer
    plain = {**spec, "normalizer": normalizer, "added_tokens": [], "post_processor": None}
    trims = _trims_end(plain)
    if trims and normalizer is not None:
        plain["normalizer"] = {**normalizer, "normalizers": normalizer["normalizers"][:-1]}
    try:
        encode = _BytePairs(orjson.dumps(plain).decode(), np.dtype(dtype))
    except Exception:  # not installed; or the bare exceptions it has for what it does not support
        return None
    space = spec["model"]["vocab"].get(_SPACE_PIECE)
    if trims and space is None:
        return None
    return functools.partial(_encode_plain, tokenizer, encode, space if trims else None)


def _trims_end(spec: Mapping[str, Any]) -> bool:
    """Tell whether the last step of normalization takes away a space at the end of a text."""
    steps = (spec["normalizer"] or {}).get("normalizers") or [{}]
    return bool(steps[-1].get("pattern") == {"Regex": " \\z"} and steps[-1]["content"] == "")


def _encode_plain(
    tokenizer: Tokenizer, encode: BatchEncoder, space: int | None, texts: Sequence[str]
) -> tuple[Ids, Lengths]:
    """Encode plain texts with a library, and others with the tokenizer.

    The library leaves a space at the end: it is a token by itself, taken off. In texts that hold
    the sign for a space it could be that sign, which stays, so those go to the tokenizer; so do
    texts with sequences that normalization must compose.

    Args:
        tokenizer: decides the ids.
        encode: the library.
        space: id of a space that normalization takes off the end; None: it takes none off.
        texts: what to encode.
    """
    plain: list[str] = []
    alone: list[int] = []
    for index, text in enumerate(texts):
        found = tokenizer.plain_text(text)
        if found is None or (space is not None and _SPACE_PIECE in text):
            alone.append(index)
            found = ""
        plain.append(found)
    ids, lengths = encode(plain)
    if space is not None:
        has_ids = lengths > 0
        last = np.cumsum(lengths)[has_ids] - 1
        is_spaced = np.zeros(lengths.size, np.bool_)
        is_spaced[has_ids] = ids[last] == space
        ids = np.delete(ids, last[is_spaced[has_ids]])
        lengths = lengths - is_spaced
    if not alone:
        return ids, lengths
    parts: list[Ids] = np.split(ids, np.cumsum(lengths)[:-1])
    for index in alone:
        parts[index] = tokenizer.encode_array(texts[index])
        lengths[index] = parts[index].size
    return np.concatenate(parts), lengths


def agrees(fast: BatchEncoder, reference: BatchEncoder, texts: Sequence[str]) -> bool:
    """Return whether two encoders give the same ids.

    Args:
        fast: the encoder that is tried; an exception counts as a difference.
        reference: the encoder that is right.
        texts: to encode.
    """
    try:
        found, lengths = fast(texts)
    except Exception:  # whatever the library raises, the other way is there
        return False
    expected, expected_lengths = reference(texts)
    return np.array_equal(lengths, expected_lengths) and np.array_equal(found, expected)


def sentencepiece_encoder(tokenizer: Tokenizer) -> BatchEncoder:
    """Return SentencePiece's own segmentation.

    It differs from ``tokenizer.encode_texts`` where two segmentations have nearly equal scores.
    Text is composed before it if the tokenizer composes text.

    Raises:
        ConfigError: the tokenizer has no SentencePiece model.
    """
    if tokenizer.sentencepiece_model is None:
        raise ConfigError("--sentencepiece: the tokenizer has no spm.model; remove the option")
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_proto=tokenizer.sentencepiece_model)

    def encode(texts: Sequence[str]) -> tuple[Ids, Lengths]:
        if tokenizer.composes:
            texts = [unicodedata.normalize("NFC", text) for text in texts]
        parts = [model.encode_as_ids(text) for text in texts]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        ids = np.fromiter(itertools.chain.from_iterable(parts), np.int32, int(lengths.sum()))
        return ids, lengths

    return encode

"""Encoding of many texts at once, by the fastest library that gives the tokenizer's ids.

That is gigatoken for byte pairs, and the tokenizer itself for others. Each run compares the ids of
its first documents; if they differ, the tokenizer itself is used.
"""

from __future__ import annotations

import functools
import itertools
import logging
import mmap
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from megatron_deberta.data.shards.format import dtype_for_vocab
from megatron_deberta.errors import ConfigError
from megatron_deberta.text.readers.reading import read_documents
from megatron_deberta.text.readers.records import Document, ReadOptions
from megatron_deberta.text.readers.sources import Source
from megatron_deberta.tokenizer import Tokenizer
from megatron_deberta.tokenizer.special_tokens import SPACE_PIECE

Ids = npt.NDArray[np.generic]
Lengths = npt.NDArray[np.int64]
# Texts to the ids of all of them one after the other, and how many each has.
BatchEncoder = Callable[[Sequence[str]], tuple[Ids, Lengths]]

# How far a process may grow over the words that a fast library keeps.
CACHE_BYTES = 1 << 27
PROBE_DOCUMENTS = 100
# Of the run's first documents, so many must get the same ids from a fast library.
PROBE_CHARACTERS = 200_000


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingOptions:
    """How texts become ids, where that differs from the usual.

    Attributes:
        append_eod: name of a token that ends each document; empty: none.
        keep_empty: records without tokens become documents without sequences; else they are left
            out.
        use_sentencepiece: encode with the SentencePiece library, not with its conversion.
    """

    append_eod: str = ""
    keep_empty: bool = False
    use_sentencepiece: bool = False

    def plan(self) -> dict[str, str | bool]:
        """Return what decides the result; nothing for the defaults, as in plans without them."""
        plan: dict[str, str | bool] = {}
        if self.append_eod:
            plan["--append-eod"] = self.append_eod
        if self.keep_empty:
            plan["--keep-empty"] = True
        if self.use_sentencepiece:
            plan["--sentencepiece (its version)"] = version("sentencepiece")
        return plan

    def eod(self, tokenizer: Tokenizer) -> int | None:
        """Return the id of ``append_eod``; None: nothing is appended.

        Raises:
            ConfigError: the tokenizer has no such token.
        """
        if not self.append_eod:
            return None
        for token_id in range(tokenizer.num_tokens):
            if tokenizer.piece(token_id) == self.append_eod:
                return token_id
        raise ConfigError(
            f"--append-eod {self.append_eod}: the tokenizer has no such token; name one of its own"
        )


def split_sentences(text: str, language: str) -> list[str]:
    """Split a text into sentences, blank ones left out."""
    import sentencex

    return [sentence for each in sentencex.segment(language, text) if (sentence := each.strip())]


def choose_encoder(
    tokenizer: Tokenizer, sources: Sequence[Source], options: ReadOptions
) -> BatchEncoder:
    """Return the fastest way that gives the tokenizer's ids for the first documents.

    Args:
        tokenizer: decides the ids.
        sources: input files, of which the beginning is read.
        options: what of them is tokenized.
    """
    reference = tokenizer.encode_texts
    fast = fast_bpe_encoder(tokenizer, dtype_for_vocab(tokenizer.vocab_size))
    if fast is None:
        return reference
    texts = list(_first_texts(sources, options))
    if agrees(fast, reference, texts):
        return fast
    logging.getLogger(__name__).warning(
        "gigatoken gives other ids than the tokenizer for this text; going on without it, slower"
    )
    return reference


def _first_texts(sources: Sequence[Source], options: ReadOptions) -> Iterator[str]:
    left = PROBE_CHARACTERS
    documents = (
        record for _, record in read_documents(sources, options) if isinstance(record, Document)
    )
    for document in itertools.islice(documents, PROBE_DOCUMENTS):
        for text in document.texts:
            yield text[:left]
            left -= len(text)
        if left <= 0:
            return


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
    space = spec["model"]["vocab"].get(SPACE_PIECE)
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
        if found is None or (space is not None and SPACE_PIECE in text):
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

"""Texts to ids, by whatever is fastest and gives the tokenizer's own ids.

Owns the choice, and its proof on every run's first documents. Refuses to trust a fast library:
where ids differ, the tokenizer's own way is taken and a line says so.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from megatron_deberta.data.indexed_format import dtype_for_vocab
from megatron_deberta.preprocess.reading import ReadOptions, read_documents
from megatron_deberta.preprocess.records import Document
from megatron_deberta.preprocess.sources import Source
from megatron_deberta.tokenizer import Tokenizer

Ids = npt.NDArray[np.generic]
Lengths = npt.NDArray[np.int64]
BatchEncoder = Callable[[Sequence[str]], tuple[Ids, Lengths]]
"""Texts to the ids of all of them one after the other, and how many each has."""

_SPACE_PIECE = "\u2581"
PROBE_DOCUMENTS = 100
PROBE_CHARACTERS = 200_000
"""Of the run's first documents, so many must get the same ids from a fast library."""


def fast_bpe_encoder(tokenizer: Tokenizer) -> BatchEncoder | None:
    """Return gigatoken's way for a byte-pair vocabulary; None where it cannot read it."""
    spec = tokenizer.spec
    if spec["model"]["type"] != "BPE":
        return None
    try:
        import gigatoken
    except ImportError:
        return None
    # Special tokens in a corpus are text, so the library must not know them.
    plain = {**spec, "added_tokens": [], "post_processor": None}
    trims = _trims_end(spec)
    if trims:
        normalizer = spec["normalizer"]
        plain["normalizer"] = {**normalizer, "normalizers": normalizer["normalizers"][:-1]}
    try:
        backend: Any = gigatoken.Tokenizer.from_json(orjson.dumps(plain).decode())
    except Exception:  # the library raises bare exceptions for what it does not support
        return None

    dtype = dtype_for_vocab(tokenizer.vocab_size)

    def encode(texts: Sequence[str]) -> tuple[Ids, Lengths]:
        # One by one: a call for many is no faster, and imports awkward arrays: 0.2 s.
        parts = [backend.encode(text) for text in texts]
        ids = np.concatenate([np.empty(0, dtype), *parts], dtype=dtype, casting="same_kind")
        return ids, np.fromiter(map(len, parts), np.int64, len(parts))

    if not trims:
        return encode
    space = spec["model"]["vocab"].get(_SPACE_PIECE)
    return None if space is None else functools.partial(_encode_trimmed, tokenizer, encode, space)


def _trims_end(spec: Mapping[str, Any]) -> bool:
    """Tell whether the last step of normalization takes away a space at the end of a text."""
    steps = (spec["normalizer"] or {}).get("normalizers") or [{}]
    return bool(steps[-1].get("pattern") == {"Regex": " \\z"} and steps[-1]["content"] == "")


def _encode_trimmed(
    tokenizer: Tokenizer, encode: BatchEncoder, space: int, texts: Sequence[str]
) -> tuple[Ids, Lengths]:
    """Encode with a library that leaves a space at the end: it is a token by itself, taken off.

    In texts that hold the sign for a space it could be that sign, which stays, so those go to the
    tokenizer.
    """
    ids, lengths = encode(["" if _SPACE_PIECE in text else text for text in texts])
    has_ids = lengths > 0
    last = np.cumsum(lengths)[has_ids] - 1
    is_spaced = np.zeros(lengths.size, np.bool_)
    is_spaced[has_ids] = ids[last] == space
    ids = np.delete(ids, last[is_spaced[has_ids]])
    lengths = lengths - is_spaced
    alone = [index for index, text in enumerate(texts) if _SPACE_PIECE in text]
    if not alone:
        return ids, lengths
    parts: list[Ids] = np.split(ids, np.cumsum(lengths)[:-1])
    for index in alone:
        parts[index] = tokenizer.encode_array(texts[index])
        lengths[index] = parts[index].size
    return np.concatenate(parts), lengths


def agrees(fast: BatchEncoder, reference: BatchEncoder, texts: Sequence[str]) -> bool:
    """Tell whether two ways give the same ids."""
    try:
        found, lengths = fast(texts)
    except Exception:  # whatever the library raises, the other way is there
        return False
    expected, expected_lengths = reference(texts)
    return np.array_equal(lengths, expected_lengths) and np.array_equal(found, expected)


def split_sentences(text: str, language: str) -> list[str]:
    """Split a text into sentences, blank ones left out."""
    return [sentence for each in _segmenter()(language, text) if (sentence := each.strip())]


@functools.cache
def _segmenter() -> Callable[[str, str], list[str]]:
    import sentencex

    segment: Callable[[str, str], list[str]] = sentencex.segment
    return segment


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
    fast = fast_bpe_encoder(tokenizer)
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

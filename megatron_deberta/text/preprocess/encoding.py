"""Encoding of texts by the fastest library that gives the tokenizer's ids.

Each run compares the ids of its first documents; if they differ, the tokenizer itself is used.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from megatron_deberta.data.shards.format import dtype_for_vocab
from megatron_deberta.errors import ConfigError
from megatron_deberta.text.readers.reading import read_documents
from megatron_deberta.text.readers.records import Document, ReadOptions
from megatron_deberta.text.readers.sources import Source
from megatron_deberta.tokenizer import Tokenizer
from megatron_deberta.tokenizer.batch_encoders import BatchEncoder, agrees, fast_bpe_encoder

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

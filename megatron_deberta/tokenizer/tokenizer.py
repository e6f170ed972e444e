"""The one tokenizer type, over a ``tokenizer.json`` that Hugging Face loads unchanged.

Owns encoding, decoding, word boundaries, the fingerprint and the exported files. Because our ids
and those of an exported model come from the same file and the same library, they are equal for
any text. Refuses to parse special tokens in corpus text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import Tokenizer as Backend

from megatron_deberta.errors import DataError
from megatron_deberta.tokenizer.special_tokens import SpecialTokens

if TYPE_CHECKING:
    from megatron_deberta.tokenizer.word_cache import WordCache

SENTENCEPIECE_FILE = "spm.model"
JSON_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SIZE_KEY = "model_vocab_size"
"""Our key in ``tokenizer_config.json``: rows of the embedding table meant for this tokenizer."""

_WORD_STARTS = ("\u2581", "Ġ", "Ċ", "ĉ", "č")
"""SentencePiece's space, and byte-level BPE's space, newline, tab and carriage return."""


class Tokenizer:
    """A vocabulary with its five special tokens.

    Args:
        spec: content of a ``tokenizer.json`` whose special tokens are declared and guarded.
        special: names of the special tokens.
        vocab_size: rows of the embedding table; at least the number of ids. None: that number.
        sentencepiece_model: the SentencePiece model it was built from, kept beside it.
        backend: what ``spec`` describes, to be had by this tokenizer alone; None: built from it.

    Attributes:
        special: names of the special tokens.
        num_tokens: ids in use, special tokens included.
        vocab_size: rows of the embedding table, ``model.vocab_size``; the ids from ``num_tokens``
            on stand for nothing.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        special: SpecialTokens,
        *,
        vocab_size: int | None = None,
        sentencepiece_model: bytes | None = None,
        backend: Backend | None = None,
    ) -> None:
        """See the class."""
        self._spec = {**spec, "truncation": None, "padding": None}
        self._backend = backend or Backend.from_str(orjson.dumps(self._spec).decode())
        self._backend.encode_special_tokens = True
        self._sentencepiece_model = sentencepiece_model
        self.special = special
        self.num_tokens = max(self._backend.get_vocab().values()) + 1
        self.vocab_size = self.num_tokens if vocab_size is None else vocab_size
        self._words = self._word_cache()

    def _word_cache(self) -> WordCache | None:
        if self._spec["model"]["type"] != "Unigram":
            return None
        # It imports Arrow, a tenth of the start-up that byte pairs need.
        from megatron_deberta.tokenizer.word_cache import WordCache, words_are_independent

        if not words_are_independent(self._spec):
            return None
        return WordCache(self._spec, self._backend, self._encode_whole)

    @property
    def spec(self) -> Mapping[str, Any]:
        """Content of the ``tokenizer.json`` behind it."""
        return self._spec

    @property
    def caches_words(self) -> bool:
        """Whether words that were met before are not encoded again."""
        return self._words is not None

    @property
    def pad_id(self) -> int:
        """Id that fills the end of a row."""
        return self._id(self.special.pad)

    @property
    def cls_id(self) -> int:
        """Id that begins a row."""
        return self._id(self.special.cls)

    @property
    def sep_id(self) -> int:
        """Id that ends a row or a segment."""
        return self._id(self.special.sep)

    @property
    def unk_id(self) -> int:
        """Id of what the vocabulary cannot spell."""
        return self._id(self.special.unk)

    @property
    def mask_id(self) -> int:
        """Id that stands for a token to predict."""
        return self._id(self.special.mask)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of every special token, others than the five roles included, ascending."""
        added = self._backend.get_added_tokens_decoder()
        return tuple(sorted(id_ for id_, token in added.items() if token.special))

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Turn text into ids, without [CLS] and [SEP] around them.

        Args:
            text: anything but lone surrogates.
            parse_special: read ``[MASK]`` and the like as the tokens, as fill-mask needs. False
                keeps them text, as a corpus needs.

        Raises:
            DataError: the text holds a lone surrogate, which is no character.
        """
        if not parse_special:
            ids: list[int] = self.encode_array(text).tolist()
            return ids
        self._backend.encode_special_tokens = False
        try:
            return self._encode_whole(text)
        finally:
            self._backend.encode_special_tokens = True

    def encode_array(self, text: str) -> npt.NDArray[np.int32]:
        """Turn text into ids, special tokens' names staying text.

        Returns:
            int32 ``[tokens]``.

        Raises:
            DataError: the text holds a lone surrogate.
        """
        return self.encode_texts([text])[0]

    def encode_texts(
        self, texts: Sequence[str]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Encode several texts as ``encode_array`` does, which is faster than one by one.

        Returns:
            Ids of all texts one after the other, int32 ``[tokens]``, and how many each has,
            int64 ``[texts]``.

        Raises:
            DataError: a text holds a lone surrogate.
        """
        if self._words is not None and (found := self._words.encode(texts)) is not None:
            return found
        arrays = [np.asarray(self._encode_whole(text), np.int32) for text in texts]
        lengths = np.fromiter((array.size for array in arrays), np.int64, len(arrays))
        return np.concatenate([np.empty(0, np.int32), *arrays]), lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text; special tokens appear by name, unused ids not at all."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def piece(self, token_id: int) -> str:
        """Return the piece behind an id; ``<unused>`` for ids between count and ``vocab_size``.

        Raises:
            DataError: the id is not of this vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise DataError(f"token id {token_id} is not in 0..{self.vocab_size - 1}")
        return self._backend.id_to_token(token_id) or "<unused>"

    def word_starts(self) -> npt.NDArray[np.bool_]:
        """Tell which pieces begin a word.

        SentencePiece and byte-level BPE mark the space that a piece begins with, WordPiece marks
        continuations. A vocabulary with neither counts every piece as a word.

        Returns:
            bool ``[vocab_size]``; special tokens and unused ids count as words of their own.
        """
        starts = np.ones(self.vocab_size, np.bool_)
        vocabulary = self._backend.get_vocab()
        model = self._spec["model"]
        if model["type"] == "WordPiece":
            prefix = model["continuing_subword_prefix"]
            for piece, token_id in vocabulary.items():
                starts[token_id] = not piece.startswith(prefix)
        elif any(piece.startswith(_WORD_STARTS) for piece in vocabulary):
            for piece, token_id in vocabulary.items():
                starts[token_id] = piece.startswith(_WORD_STARTS)
        starts[list(self.special_ids)] = True
        return starts

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over what determines ids: model, normalization, splitting, roles."""
        deciding = ("model", "normalizer", "pre_tokenizer", "added_tokens")
        content = {**{key: self._spec[key] for key in deciding}, "roles": self.special.by_role()}
        encoded = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        return hashlib.sha256(encoded).hexdigest()

    def save(self, directory: str) -> None:
        """Write the files with which ``AutoTokenizer.from_pretrained(directory)`` gives our ids.

        The class named there is the generic one, which takes ``tokenizer.json`` as it is;
        DeBERTa's own class would rebuild it with another normalizer.

        Raises:
            OSError: the directory cannot be written.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{role}_token": name for role, name in self.special.by_role().items()},
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            SIZE_KEY: self.vocab_size,
        }
        spec = json.dumps(self._spec, ensure_ascii=False, indent=1)
        (folder / JSON_FILE).write_text(spec + "\n", encoding="utf-8")
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if self._sentencepiece_model is not None:
            (folder / SENTENCEPIECE_FILE).write_bytes(self._sentencepiece_model)

    def _id(self, name: str) -> int:
        token_id = self._backend.token_to_id(name)
        assert token_id is not None, name
        return token_id

    def _encode_whole(self, text: str) -> list[int]:
        try:
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise DataError(f"text {text[:40]!r}... is not valid Unicode: {error}") from error

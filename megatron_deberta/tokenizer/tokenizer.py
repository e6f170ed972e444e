"""The tokenizer type, a wrapper of a ``tokenizer.json`` that Hugging Face loads unchanged."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from megatron_deberta.errors import DataError
from megatron_deberta.tokenizer.charsmap import (
    PlainTextCheck,
    is_longest_match,
    without_separators,
)
from megatron_deberta.tokenizer.special_tokens import SPACE_PIECE, SpecialTokens

if TYPE_CHECKING:
    from megatron_deberta.tokenizer.word_cache import WordCache

SENTENCEPIECE_FILE = "spm.model"
JSON_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
# Our key in ``tokenizer_config.json``: rows of the embedding table meant for this tokenizer.
SIZE_KEY = "model_vocab_size"
# Largest size of a vocabulary; tables of this many entries fit into any machine's memory.
MAX_ROWS = 1 << 24
# SentencePiece's space, and byte-level BPE's space, newline, tab and carriage return.
_WORD_STARTS = (SPACE_PIECE, "Ġ", "Ċ", "ĉ", "č")
# Unicode's categories of punctuation, spaces and control characters, all below the limit.
_MARKS = frozenset("Pc Pd Pe Pf Pi Po Ps Zs Cc Cf".split())
_MARK_LIMIT = 0x20000
# Vowels and final consonants of Hangul, half-width ones, and half-width voicing marks.
_OTHER_MARKS = frozenset(map(chr, [*range(0x1160, 0x1200), *range(0xFF9E, 0xFFDD)]))


class Tokenizer:
    """A vocabulary with five special tokens.

    Args:
        spec: content of a ``tokenizer.json`` whose special tokens are declared and guarded.
        special: names of the special tokens.
        vocab_size: rows of the embedding table, at least ``num_tokens``; None: ``num_tokens``.
        sentencepiece_model: the SentencePiece model it was built from, saved with it.
        backend: built from ``spec`` and not shared; None: build it.

    Attributes:
        spec: content of its ``tokenizer.json``.
        sentencepiece_model: as given.
        special: names of the special tokens.
        num_tokens: ids in use, special tokens included.
        vocab_size: rows of the embedding table, ``model.vocab_size``; ids from ``num_tokens`` on
            are unused.
        pad_id: id of [PAD].
        cls_id: id of [CLS].
        sep_id: id of [SEP].
        unk_id: id of [UNK].
        mask_id: id of [MASK].
        special_ids: ids of all special tokens, ascending, including those without a role.
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
        self.spec: Mapping[str, Any] = {**spec, "truncation": None, "padding": None}
        self._backend = backend or Backend.from_str(orjson.dumps(self.spec).decode())
        self._backend.encode_special_tokens = True
        self.sentencepiece_model = sentencepiece_model
        self.special = special
        ids = self._backend.get_vocab()
        self.num_tokens = max(ids.values()) + 1
        if self.num_tokens > MAX_ROWS:
            raise DataError(
                f"tokenizer: id {self.num_tokens - 1:,} is above {MAX_ROWS - 1:,}; the vocabulary "
                "is damaged"
            )
        self.vocab_size = self.num_tokens if vocab_size is None else vocab_size
        self.pad_id, self.cls_id = ids[special.pad], ids[special.cls]
        self.sep_id, self.unk_id = ids[special.sep], ids[special.unk]
        self.mask_id = ids[special.mask]
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = tuple(sorted(id_ for id_, token in added.items() if token.special))
        self._plain_backend: Backend | None = None
        if is_longest_match(self.spec["normalizer"]):
            self._plain_backend = self._with_same_model(self.plain_normalizer)

    def _with_same_model(self, normalizer: Mapping[str, Any] | None) -> Backend | None:
        """Build a pipeline around the same model, which is not copied.

        It encodes the names of special tokens as text. None: the library orders added tokens anew.
        """
        shell = {
            **self.spec,
            "normalizer": normalizer,
            "added_tokens": [],
            "post_processor": None,
            "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
        }
        built = Backend.from_str(orjson.dumps(shell).decode())
        built.model = self._backend.model
        built.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder()
        for _, token in sorted(added.items()):
            (built.add_special_tokens if token.special else built.add_tokens)([token])
        return built if built.get_added_tokens_decoder() == added else None

    @cached_property
    def _parsing_backend(self) -> Backend:
        """The pipeline that parses special tokens.

        A pipeline of its own: the switch of the other one would hold for all threads.
        """
        built = self._with_same_model(self.spec["normalizer"])
        built = built or Backend.from_str(orjson.dumps(self.spec).decode())
        built.encode_special_tokens = False
        return built

    @cached_property
    def _words(self) -> WordCache | None:
        """Encoder by words, made for the first text: training needs only ids of special tokens."""
        if self.spec["model"]["type"] != "Unigram":
            return None
        # pyarrow belongs to the extras for text; the ids are the same without it.
        if importlib.util.find_spec("pyarrow") is None:
            return None
        from megatron_deberta.tokenizer.word_cache import WordCache, words_are_independent

        if not words_are_independent(self.spec):
            return None
        return WordCache(self.spec, self._backend, self._encode_whole)

    @cached_property
    def composes(self) -> bool:
        """Whether text is brought to NFC first, so that all its canonical forms have equal ids."""
        normalizer = self.spec["normalizer"] or {}
        first = normalizer.get("normalizers", [normalizer])[:1]
        return any(step.get("type") in ("NFC", "NFKC") for step in first)

    @cached_property
    def plain_normalizer(self) -> Mapping[str, Any] | None:
        """Normalizer of the ``tokenizer.json`` without what a ``plain_text`` does not need."""
        normalizer = without_separators(self.spec["normalizer"])
        if normalizer is None or not is_longest_match(self.spec["normalizer"]):
            return normalizer
        steps = normalizer["normalizers"]
        return {**normalizer, "normalizers": steps[1:] if self.composes else steps}

    def plain_text(self, text: str) -> str | None:
        """Return the text for which ``plain_normalizer`` gives what the normalizer gives for this.

        Returns:
            The text, composed if the tokenizer does so; None: there is no such text.
        """
        if self._plain_text_check is None:
            return text
        if self.composes:
            # Returned as it is where a quick check finds nothing to compose.
            text = unicodedata.normalize("NFC", text)
        return text if self._plain_text_check(text) else None

    @cached_property
    def _plain_text_check(self) -> PlainTextCheck | None:
        steps = (self.spec["normalizer"] or {}).get("normalizers", [])
        has_map = any(step["type"] == "Precompiled" for step in steps)
        return PlainTextCheck(self.spec["normalizer"]) if has_map else None

    @property
    def caches_words(self) -> bool:
        """Whether the ids of words are cached."""
        return self._words is not None

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Encode text without adding [CLS] and [SEP].

        Args:
            text: the text.
            parse_special: encode names such as ``[MASK]`` as special tokens (for fill-mask);
                False: as text (for corpora).

        Raises:
            DataError: the text contains a lone surrogate.
        """
        if not parse_special:
            ids: list[int] = self.encode_array(text).tolist()
            return ids
        return self._encode_with(self._parsing_backend, text)

    def encode_array(self, text: str) -> npt.NDArray[np.int32]:
        """Encode text; names of special tokens are encoded as text.

        Returns:
            int32 ``[tokens]``.

        Raises:
            DataError: the text contains a lone surrogate.
        """
        return self.encode_texts([text])[0]

    def encode_texts(
        self, texts: Sequence[str]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Encode several texts as ``encode_array`` does, but faster than one by one.

        Returns:
            Concatenated ids of all texts, int32 ``[tokens]``, and their number per text, int64
            ``[texts]``.

        Raises:
            DataError: a text contains a lone surrogate.
        """
        if self._words is not None and (found := self._words.encode(texts)) is not None:
            return found
        arrays = [np.asarray(self._encode_whole(text), np.int32) for text in texts]
        lengths = np.fromiter((array.size for array in arrays), np.int64, len(arrays))
        return np.concatenate([np.empty(0, np.int32), *arrays]), lengths

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """Encode texts as ``encode_array`` does, with the characters of each piece.

        Returns:
            For each text ids, int32 ``[tokens]``, and offsets, int32 ``[tokens, 2]``: the first
            character of the piece and the one after its last, without the white space around
            it. Marks that were composed with a character before them, or removed, belong to that
            character's piece. A piece that is only white space has an empty span.

        Raises:
            DataError: a text contains a lone surrogate.
        """
        try:
            found = self._backend.encode_batch(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise DataError(f"a text is not valid Unicode: {error}") from error
        return [
            (np.array(item.ids, np.int32), self._trimmed(text, item.ids, item.offsets))
            for text, item in zip(texts, found, strict=True)
        ]

    def _trimmed(
        self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
    ) -> npt.NDArray[np.int32]:
        """Remove white space from the spans of pieces, and the span of a piece without text."""
        spans = np.array(offsets, np.int32).reshape(-1, 2)
        for index, (token_id, (start, end)) in enumerate(zip(ids, offsets, strict=True)):
            if self._is_blank[token_id]:
                # SentencePiece's space before a text has the span of the first character.
                spans[index] = end if text[start:end].isspace() else start
                continue
            while start < end and text[start].isspace():
                start += 1
            while start < end and text[end - 1].isspace():
                end -= 1
            spans[index] = start, end
        # One character may become several words; the space between them would lead back.
        spans = np.maximum.accumulate(spans, axis=0)
        if not text.isascii():
            _extend_over_marks(text, spans)
        return spans

    @cached_property
    def _is_blank(self) -> npt.NDArray[np.bool_]:
        """Which pieces consist of spaces only."""
        blank = np.zeros(self.vocab_size, np.bool_)
        for piece, token_id in self._backend.get_vocab().items():
            blank[token_id] = not piece.strip("".join(_WORD_STARTS))
        return blank

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; special tokens appear by name, unused ids not at all."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def piece(self, token_id: int) -> str:
        """Return the piece of an id; ``<unused>`` from ``num_tokens`` to ``vocab_size``.

        Raises:
            DataError: the id is outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise DataError(f"token id {token_id} is not in 0..{self.vocab_size - 1}")
        return self._backend.id_to_token(token_id) or "<unused>"

    def piece_text(self, token_id: int) -> str:
        """Return a piece as readable text: with a space where it begins a word.

        Bytes that are no character by themselves are returned as the piece.

        Raises:
            DataError: the id is outside the vocabulary.
        """
        piece = self.piece(token_id)
        if self._backend.decoder is None:
            return piece.replace(SPACE_PIECE, " ")
        # Decoded after a letter: the decoder removes the space at the beginning of a text.
        text: str = self._backend.decoder.decode(["a", piece])[1:]
        return piece if "\ufffd" in text else text

    def word_starts(self) -> npt.NDArray[np.bool_]:
        """Return which pieces begin a word.

        SentencePiece and byte-level BPE mark the space that a piece begins with, WordPiece marks
        continuations. A vocabulary with neither counts every piece as a word.

        Returns:
            bool ``[vocab_size]``; special tokens and unused ids count as words of their own.
        """
        starts = np.ones(self.vocab_size, np.bool_)
        vocabulary = self._backend.get_vocab()
        model = self.spec["model"]
        if model["type"] == "WordPiece":
            prefix = model["continuing_subword_prefix"]
            for piece, token_id in vocabulary.items():
                starts[token_id] = not piece.startswith(prefix)
        elif any(piece.startswith(_WORD_STARTS) for piece in vocabulary):
            for piece, token_id in vocabulary.items():
                starts[token_id] = piece.startswith(_WORD_STARTS)
        starts[list(self.special_ids)] = True
        return starts

    def single_marks(self) -> npt.NDArray[np.bool_]:
        """Return which pieces are one character of punctuation, white space or control.

        Microsoft's generator of masks counts them as words of their own.

        Returns:
            bool ``[vocab_size]``.
        """
        marks = np.zeros(self.vocab_size, np.bool_)
        to_piece: Callable[[str], str] = str
        if "ByteLevel" in json.dumps(self.spec["decoder"]):
            to_piece = _byte_level_piece
        ids = map(self._backend.token_to_id, map(to_piece, _mark_characters()))
        marks[[token_id for token_id in ids if token_id is not None]] = True
        return marks

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that determines ids: model, normalizer, splitting, roles.

        Without the steps that make ``tokenizers`` normalize as SentencePiece does, so that shards
        and runs made before these steps are still this tokenizer's.
        """
        keys = ("model", "normalizer", "pre_tokenizer", "added_tokens")
        content = {**{key: self.spec[key] for key in keys}, "roles": self.special.by_role()}
        content["normalizer"] = without_separators(self.spec["normalizer"])
        encoded = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        return hashlib.sha256(encoded).hexdigest()

    def save(self, directory: str) -> None:
        """Write the files that ``AutoTokenizer.from_pretrained(directory)`` loads.

        The class named in them is the generic one, which takes ``tokenizer.json`` unchanged;
        DeBERTa's own class would replace the normalizer.

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
        spec = json.dumps(self.spec, ensure_ascii=False, indent=1)
        (folder / JSON_FILE).write_text(spec + "\n", encoding="utf-8")
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if self.sentencepiece_model is not None:
            (folder / SENTENCEPIECE_FILE).write_bytes(self.sentencepiece_model)

    def _encode_whole(self, text: str) -> list[int]:
        if self._plain_backend is not None and (plain := self.plain_text(text)) is not None:
            return self._encode_with(self._plain_backend, plain)
        return self._encode_with(self._backend, text)

    @staticmethod
    def _encode_with(backend: Backend, text: str) -> list[int]:
        try:
            return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise DataError(f"text {text[:40]!r}... is not valid Unicode: {error}") from error


def _extend_over_marks(text: str, spans: npt.NDArray[np.int32]) -> None:
    """Extend spans over the marks behind them that no other piece has, in place."""
    starts = spans[:, 0]
    for index, (start, end) in enumerate(spans.tolist()):
        if start == end or end == len(text) or not _is_mark(text[end]):
            continue
        others = starts[np.searchsorted(starts, end) :]
        limit = int(others[0]) if others.size else len(text)
        while end < limit and _is_mark(text[end]):
            end += 1
        spans[index, 1] = end


def _is_mark(character: str) -> bool:
    """Tell whether a character may be composed with the one before it."""
    return unicodedata.category(character)[0] == "M" or character in _OTHER_MARKS


@cache
def _mark_characters() -> list[str]:
    return [
        character
        for character in map(chr, range(_MARK_LIMIT))
        if unicodedata.category(character) in _MARKS or character in string.punctuation
    ]


def _byte_level_piece(text: str) -> str:
    """Return a text of one word as byte-level BPE writes it."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return str(splitter.pre_tokenize_str(text)[0][0])

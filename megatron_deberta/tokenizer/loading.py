"""Loading of tokenizers: SentencePiece, byte-level BPE and ``tokenizer.json``.

Vocabularies with duplicate ids, or with special tokens that are missing, shared or reachable from
plain text, are rejected.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import Field
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from typing_extensions import TypedDict

from megatron_deberta.errors import DataError, MissingInputError
from megatron_deberta.files import did_you_mean
from megatron_deberta.parsing import Number, parse_json
from megatron_deberta.tokenizer.charsmap import is_longest_match, longest_match_normalizer
from megatron_deberta.tokenizer.special_tokens import (
    SPACE_PIECE,
    USUAL_NAMES,
    SpecialTokens,
    add_special_tokens,
    declare_special_tokens,
    has_guard,
    refuse_leaks,
    resolve_special_tokens,
    usual_special_tokens,
    with_guard,
)
from megatron_deberta.tokenizer.tokenizer import (
    CONFIG_FILE,
    JSON_FILE,
    MAX_ROWS,
    SENTENCEPIECE_FILE,
    SIZE_KEY,
    Tokenizer,
)

logger = logging.getLogger(__name__)

Id = Annotated[int, Field(ge=0, lt=MAX_ROWS)]
"""Libraries allocate tables of as many rows as the largest id."""


class _AddedToken(TypedDict):
    id: Id
    content: str
    special: bool


class _Model(TypedDict):
    type: str
    vocab: list[tuple[str, Number]] | dict[str, Id]


class _Spec(TypedDict):
    """What is read from a ``tokenizer.json`` besides what the library reads."""

    model: _Model
    added_tokens: list[_AddedToken]
    pre_tokenizer: dict[str, Any] | None


# Begins the name of the normalization in models of our own training: text is composed before it.
COMPOSED = "nfc+"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_FILES = "tokenizer.json, spm.model (or one other *.model), or vocab.json with merges.txt"


def load_tokenizer(path: str) -> Tokenizer:
    """Load a tokenizer of any supported kind.

    Args:
        path: a directory with ``tokenizer.json``, a SentencePiece ``*.model``, or a byte-level
            BPE's ``vocab.json`` and ``merges.txt`` or one other ``*vocab.json`` and
            ``*merges.txt`` (tried in this order); or a ``*.model`` or ``tokenizer.json`` file.

    Raises:
        DataError: no tokenizer is found, a file is damaged, two tokens share an id, or a special
            token is missing, shared, or the encoding of plain text.
    """
    with _errors_of_the_library(f"tokenizer {path}: damaged"):
        return _load(path)


def _load(path: str) -> Tokenizer:
    location = Path(path)
    if location.is_dir():
        if (location / JSON_FILE).is_file():
            return _load_json(location / JSON_FILE)
        model = _find_one(location, SENTENCEPIECE_FILE, "*.model", "name one of them")
        if model is not None:
            return _load_sentencepiece(model)
        # GPT-2's are also called ``gpt2-vocab.json``.
        vocabulary, merges = (
            _find_one(location, name, f"*{name}", f"rename one {name}")
            for name in ("vocab.json", "merges.txt")
        )
        if vocabulary is not None and merges is not None:
            return _load_byte_level(vocabulary, merges, f"tokenizer {location}")
        raise MissingInputError(f"tokenizer {path}: expected {_FILES} in this folder")
    if not location.is_file():
        raise MissingInputError(
            f"tokenizer {path}: no such file or folder"
            f"{did_you_mean(location) or f'; expected {_FILES}'}"
        )
    return _load_json(location) if location.suffix == ".json" else _load_sentencepiece(location)


def sentencepiece_tokenizer(content: bytes, where: str) -> Tokenizer:
    """Build the tokenizer of a SentencePiece model; ``vocab_size`` is rounded up as released.

    Args:
        content: bytes of the ``.model`` file.
        where: its name in errors.

    Raises:
        DataError: see ``load_tokenizer``.
    """
    backend, special = build_backend(content, where)
    refuse_leaks(backend, special, where)
    rows = rows_for(backend.get_vocab_size())
    return Tokenizer(
        orjson.loads(backend.to_str()), special, vocab_size=rows, sentencepiece_model=content
    )


def _find_one(folder: Path, name: str, pattern: str, remedy: str) -> Path | None:
    """Find the file of this name, or else the only one that matches ``pattern``."""
    if (folder / name).is_file():
        return folder / name
    found = sorted(folder.glob(pattern))
    if len(found) > 1:
        raise DataError(f"tokenizer {folder}: {len(found)} {pattern} files; {remedy}")
    return found[0] if found else None


def _load_sentencepiece(path: Path) -> Tokenizer:
    config = _read_config(path.with_name(CONFIG_FILE))
    for setting in ("do_lower_case", "split_by_punct"):
        if config.get(setting):
            raise DataError(
                f"tokenizer {path}: {setting}=true in {CONFIG_FILE} is not supported with a "
                f"SentencePiece model; convert it to {JSON_FILE} first"
            )
    return sentencepiece_tokenizer(_read(path), f"tokenizer {path}")


def _load_byte_level(vocabulary: Path, merges: Path, where: str) -> Tokenizer:
    """Load GPT-2's or RoBERTa's files; missing special tokens are appended after the pieces."""
    parse_json(
        _read(vocabulary), dict[str, Id], vocabulary, "a vocabulary", remedy="download it again"
    )
    with _errors_of_the_library(f"{where}: {vocabulary.name} and {merges.name} do not match"):
        model = models.BPE.from_file(str(vocabulary), str(merges))
        backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    pieces = backend.get_vocab()
    special = usual_special_tokens(pieces)
    others = [name for name in special.by_role().values() if name != special.mask]
    add_special_tokens(backend, others)
    # Pieces include the space before them, so the mask token does, as RoBERTa's.
    add_special_tokens(backend, [special.mask], lstrip=True)
    if "<|endoftext|>" in pieces:
        add_special_tokens(backend, ["<|endoftext|>"])
    declare_special_tokens(backend, special)
    refuse_leaks(backend, special, where)
    return Tokenizer(orjson.loads(backend.to_str()), special, backend=backend)


def _load_json(path: Path) -> Tokenizer:
    where = f"tokenizer {path}"
    text = _read(path)
    parse_json(
        text, _Spec, where, "a tokenizer.json", remedy="download it again", ignore_unknown=True
    )
    spec = orjson.loads(text)
    with _errors_of_the_library(f"{where}: not a tokenizer.json"):
        backend = Backend.from_str(text.decode())
    backend.no_truncation()
    backend.no_padding()
    vocabulary = _unambiguous_vocabulary(spec, backend, where)
    config = _read_config(path.with_name(CONFIG_FILE))
    declared = {role: name for role in USUAL_NAMES if (name := _name(config, f"{role}_token"))}
    special = resolve_special_tokens(vocabulary, declared, where)
    declare_special_tokens(backend, special)
    _guard(backend)
    refuse_leaks(backend, special, where)
    _warn_of_lost_marks(spec, where)
    source = path.with_name(SENTENCEPIECE_FILE)
    return Tokenizer(
        # Scores are kept as in the file: the library's round trip is not exact.
        {**orjson.loads(backend.to_str()), "model": spec["model"]},
        special,
        backend=backend,
        vocab_size=_rows(config, backend, where),
        sentencepiece_model=_read(source) if source.is_file() else None,
    )


@contextmanager
def _errors_of_the_library(message: str) -> Iterator[None]:
    """Turn errors of ``tokenizers``, which are bare exceptions or panics, into ``DataError``."""
    try:
        yield
    except (DataError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise DataError(f"{message} ({error})") from error


@lru_cache(maxsize=16)
def _warn_once(message: str) -> None:
    logger.warning("warning: %s", message)


def _warn_of_lost_marks(spec: dict[str, Any], where: str) -> None:
    """Warn of a ``Precompiled`` step that loses marks; its ids stay what the model has learnt."""
    normalizer = spec["normalizer"] or {}
    steps = normalizer.get("normalizers", [normalizer])
    if is_longest_match(normalizer) or not any(s.get("type") == "Precompiled" for s in steps):
        return
    _warn_once(
        f"{where}: decomposed text (NFD) loses marks in its normalizer, and keeps these ids; "
        "give such text in NFC (preprocess --normalize nfc), or train or convert the tokenizer anew"
    )


def _guard(backend: Backend) -> None:
    """Guard special tokens that are pieces of a unigram model against plain text."""
    spec = orjson.loads(backend.to_str())
    if spec["model"]["type"] != "Unigram":
        return
    pieces = {piece for piece, _ in spec["model"]["vocab"]}
    names = [token["content"] for token in spec["added_tokens"] if token["special"]]
    reachable = [name for name in names if name in pieces]
    if reachable and not has_guard(spec, reachable):
        backend.pre_tokenizer = with_guard(backend.pre_tokenizer, reachable)


def _rows(config: dict[str, Any], backend: Backend, where: str) -> int | None:
    rows, tokens = config.get(SIZE_KEY), max(backend.get_vocab().values()) + 1
    if rows is not None and (type(rows) is not int or not tokens <= rows <= MAX_ROWS):
        raise DataError(
            f"{where}: {SIZE_KEY} {rows!r} in {CONFIG_FILE} is below the {tokens} ids, or above "
            f"{MAX_ROWS:,}; remove the key"
        )
    return rows


def _unambiguous_vocabulary(spec: dict[str, Any], backend: Backend, where: str) -> dict[str, int]:
    vocabulary: dict[str, int] = backend.get_vocab()
    listed = len(spec["model"]["vocab"])
    if len(set(vocabulary.values())) != len(vocabulary):
        raise DataError(f"{where}: two tokens share an id")
    if listed != len(backend.get_vocab(with_added_tokens=False)):
        raise DataError(f"{where}: a piece occurs twice among its {listed} pieces")
    for token in spec["added_tokens"]:
        if vocabulary.get(token["content"]) != token["id"]:
            raise DataError(
                f"{where}: added token {token['content']!r} says id {token['id']}, "
                f"the vocabulary {vocabulary.get(token['content'])}"
            )
    return vocabulary


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return parse_json(
        _read(path), dict[str, Any], path, "a tokenizer's config", remedy="download it again"
    )


def _name(config: dict[str, Any], key: str) -> str | None:
    value = config.get(key)
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def rows_for(num_tokens: int) -> int:
    """Return the rows of the embedding table for a SentencePiece vocabulary.

    Source: the DeBERTa v2 and v3 releases, rounded up to hundreds: 128,100 rows for 128,000 pieces
    and [MASK].
    """
    return math.ceil(num_tokens / 100) * 100


def build_backend(content: bytes, where: str) -> tuple[Backend, SpecialTokens]:
    """Build the pipeline of a SentencePiece model, missing special tokens appended.

    Pieces keep their ids. Text is normalized as SentencePiece does it, and before that brought to
    NFC if the model is of our own training. Extra spaces are removed if the model says so. Text
    after a special token continues the word, as in training: ``[MASK].`` ends in the piece of a
    full stop after a word, not in that of one at the beginning of a text.

    Args:
        content: bytes of the ``.model`` file.
        where: its name in errors.

    Raises:
        DataError: not a SentencePiece model, or one with settings that have no equivalent.
    """
    proto = _parse_model(content, where)
    _check_supported(proto, where)
    special = _special_tokens(proto)
    is_unigram = proto.trainer_spec.model_type == _UNIGRAM
    backend = Backend(_unigram_model(proto) if is_unigram else _bpe_model(proto))
    tidy = proto.normalizer_spec.remove_extra_whitespaces
    backend.normalizer = _sentencepiece_normalizer(proto.normalizer_spec, where)
    metaspace = pre_tokenizers.Metaspace(
        replacement=SPACE_PIECE,
        prepend_scheme="first" if proto.normalizer_spec.add_dummy_prefix else "never",
        split=tidy and proto.trainer_spec.split_by_whitespace,
    )
    apart = [piece.piece for piece in proto.pieces if piece.type != _NORMAL]
    backend.pre_tokenizer = with_guard(metaspace, apart) if is_unigram else metaspace
    spaces = decoders.Replace(SPACE_PIECE, " "), decoders.Strip(" ", 1, 0)
    fallback = decoders.ByteFallback(), decoders.Fuse()
    backend.decoder = decoders.Sequence([spaces[0], *fallback, spaces[1]])
    backend.add_tokens(
        [AddedToken(p.piece, normalized=False) for p in proto.pieces if p.type == _USER_DEFINED]
    )
    add_special_tokens(backend, [p.piece for p in proto.pieces if p.type in (_CONTROL, _UNKNOWN)])
    declare_special_tokens(backend, special)
    return backend, special


def named_as_composing(content: bytes) -> bytes:
    """Return a trained model whose name of the normalization says that text is composed first.

    SentencePiece does not read the name.
    """
    proto = _parse_model(content, "the trained model")
    proto.normalizer_spec.name = COMPOSED + proto.normalizer_spec.name
    return bytes(proto.SerializeToString())


def _parse_model(content: bytes, where: str) -> Any:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise DataError(f"{where}: not a SentencePiece model ({error})") from error
    if not proto.pieces:
        raise DataError(f"{where}: not a SentencePiece model (it has no pieces)")
    return proto


def _check_supported(proto: Any, where: str) -> None:
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (_UNIGRAM, _BPE):
        raise DataError(f"{where}: model_type {trainer.model_type} is neither unigram nor bpe")
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise DataError(
            f"{where}: treat_whitespace_as_suffix=true and escape_whitespaces=false are not "
            "supported; train with SentencePiece's defaults"
        )
    name, count = Counter(piece.piece for piece in proto.pieces).most_common(1)[0]
    if count > 1:
        raise DataError(f"{where}: piece {name!r} occurs twice")


def _special_tokens(proto: Any) -> SpecialTokens:
    control = {piece.piece for piece in proto.pieces if piece.type == _CONTROL}
    special = usual_special_tokens(control)
    unknown = next((piece.piece for piece in proto.pieces if piece.type == _UNKNOWN), special.unk)
    return replace(special, unk=unknown)


def _sentencepiece_normalizer(spec: Any, where: str) -> normalizers.Sequence:
    steps: list[normalizers.Normalizer] = []
    if spec.name.startswith(COMPOSED):
        steps.append(normalizers.NFC())
    if spec.precompiled_charsmap:
        try:
            steps += longest_match_normalizer(spec.precompiled_charsmap)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
    if spec.remove_extra_whitespaces:
        # A leading space is kept: the metaspace would add the same one.
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(Regex(" \\z"), ""))
    return normalizers.Sequence(steps)


def _unigram_model(proto: Any) -> models.Unigram:
    # Nine digits identify a float32 score and, unlike seventeen, survive the library's JSON reader.
    return models.Unigram(
        [(piece.piece, float(f"{piece.score:.9g}")) for piece in proto.pieces],
        unk_id=proto.trainer_spec.unk_id,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _bpe_model(proto: Any) -> models.BPE:
    """Derive the merges: every split of a piece into two pieces, best score first.

    SentencePiece merges the neighbours whose union has the best score. Only normal pieces are
    merged, so text never becomes a control or byte piece.
    """
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    ids = {piece.piece: token_id for token_id, piece in enumerate(proto.pieces)}
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                merges.append((-score, ids[left], ids[right], (left, right)))
    return models.BPE(
        vocab=ids,
        merges=[pair for *_, pair in sorted(merges)],
        unk_token=next((p.piece for p in proto.pieces if p.type == _UNKNOWN), None),
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )

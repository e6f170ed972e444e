"""Conversion of SentencePiece models to ``tokenizer.json`` pipelines."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from megatron_deberta.errors import DataError
from megatron_deberta.tokenizer.charsmap import longest_match_normalizer
from megatron_deberta.tokenizer.special_tokens import (
    SpecialTokens,
    add_special_tokens,
    declare_special_tokens,
    usual_special_tokens,
    with_guard,
)

SPACE = "\u2581"
# Begins the name of the normalization in models of our own training: text is composed before it.
COMPOSED = "nfc+"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


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
    proto = _parse(content, where)
    _check_supported(proto, where)
    special = _special_tokens(proto)
    is_unigram = proto.trainer_spec.model_type == _UNIGRAM
    backend = Backend(_unigram(proto) if is_unigram else _bpe(proto))
    tidy = proto.normalizer_spec.remove_extra_whitespaces
    backend.normalizer = _normalizer(proto.normalizer_spec, where)
    metaspace = pre_tokenizers.Metaspace(
        replacement=SPACE,
        prepend_scheme="first" if proto.normalizer_spec.add_dummy_prefix else "never",
        split=tidy and proto.trainer_spec.split_by_whitespace,
    )
    apart = [piece.piece for piece in proto.pieces if piece.type != _NORMAL]
    backend.pre_tokenizer = with_guard(metaspace, apart) if is_unigram else metaspace
    spaces = decoders.Replace(SPACE, " "), decoders.Strip(" ", 1, 0)
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
    proto = _parse(content, "the trained model")
    proto.normalizer_spec.name = COMPOSED + proto.normalizer_spec.name
    return bytes(proto.SerializeToString())


def _parse(content: bytes, where: str) -> Any:
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


def _normalizer(spec: Any, where: str) -> normalizers.Sequence:
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


def _unigram(proto: Any) -> models.Unigram:
    # Nine digits identify a float32 score and, unlike seventeen, survive the library's JSON reader.
    return models.Unigram(
        [(piece.piece, float(f"{piece.score:.9g}")) for piece in proto.pieces],
        unk_id=proto.trainer_spec.unk_id,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _bpe(proto: Any) -> models.BPE:
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

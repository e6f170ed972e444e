"""The five special tokens, and the guard that keeps their names in plain text ordinary text."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

from megatron_deberta.errors import DataError

SPACE_PIECE = "\u2581"
# Usual names of each role: those of DeBERTa and BERT, then those of RoBERTa.
USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "unk": ("[UNK]", "<unk>"),
    "mask": ("[MASK]", "<mask>"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Name of each role's token, in the order of the release's ids."""

    pad: str = "[PAD]"
    cls: str = "[CLS]"
    sep: str = "[SEP]"
    unk: str = "[UNK]"
    mask: str = "[MASK]"

    def by_role(self) -> dict[str, str]:
        """Return the names keyed by role."""
        return asdict(self)


def usual_special_tokens(names: Container[str]) -> SpecialTokens:
    """Return the first usual name of each role that is among ``names``, or else DeBERTa's."""
    return SpecialTokens(
        **{
            role: next((name for name in usual if name in names), usual[0])
            for role, usual in USUAL_NAMES.items()
        }
    )


def add_special_tokens(backend: Backend, names: Iterable[str], **options: bool) -> None:
    """Add special tokens to ``backend``, found in text as they are, before its normalization."""
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False, **options) for name in names]
    )


def resolve_special_tokens(
    vocabulary: Mapping[str, int], declared: Mapping[str, str], where: str
) -> SpecialTokens:
    """Find the token of every role.

    Args:
        vocabulary: ids of all tokens, added ones included.
        declared: names by role from ``tokenizer_config.json``, which take precedence.
        where: the tokenizer's name in errors.

    Raises:
        DataError: a role has no token, several tokens, or the token of another role.
    """
    found: dict[str, str] = {}
    missing: list[str] = []
    for role, usual in USUAL_NAMES.items():
        names = [declared[role]] if role in declared else usual
        candidates = [name for name in names if name in vocabulary]
        if len(candidates) > 1:
            raise DataError(
                f"{where}: {' and '.join(candidates)} could both be the {role} token; "
                f"name one as {role}_token in tokenizer_config.json"
            )
        if candidates:
            found[role] = candidates[0]
        else:
            missing.append(f"{role} ({' or '.join(names)})")
    if missing:
        raise DataError(f"{where}: no token for {', '.join(missing)}; add it to the vocabulary")
    special = SpecialTokens(**found)
    roles_of_ids: dict[int, str] = {}
    for role, name in found.items():
        other = roles_of_ids.setdefault(vocabulary[name], role)
        if other != role:
            raise DataError(
                f"{where}: {other} and {role} share token {name} (id {vocabulary[name]}); "
                "give each role a token of its own"
            )
    return special


def declare_special_tokens(backend: Backend, special: SpecialTokens) -> None:
    """Add the roles to ``backend`` as special tokens; frame texts with [CLS] and [SEP]."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    add_special_tokens(backend, [n for n in special.by_role().values() if n not in known])
    ids = {name: backend.token_to_id(name) for name in (special.cls, special.sep)}
    backend.post_processor = TemplateProcessing(
        single=f"{special.cls} $A {special.sep}",
        pair=f"{special.cls} $A {special.sep} $B:1 {special.sep}:1",
        special_tokens=list(ids.items()),
    )


def guard_pattern(names: Iterable[str]) -> str:
    """Return a pattern that matches the first character of each name before the rest of it."""
    rests: dict[str, list[str]] = {}
    for name in sorted(names):
        rests.setdefault(name[0], []).append(re.escape(name[1:]))
    return "|".join(
        f"{re.escape(first)}(?={'|'.join(endings)})" for first, endings in rests.items()
    )


def with_guard(pre_tokenizer: PreTokenizer | None, names: Iterable[str]) -> PreTokenizer:
    """Extend a pre-tokenizer to split each of ``names`` after its first character.

    Unlike SentencePiece, the unigram model of ``tokenizers`` finds control pieces in text: without
    the split, the text ``[CLS]`` becomes the special token.
    """
    guard = Split(Regex(guard_pattern(names)), "merged_with_previous")
    return guard if pre_tokenizer is None else Sequence([pre_tokenizer, guard])


def has_guard(spec: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether the pre-tokenizer of a ``tokenizer.json`` already ends with the guard."""
    pre_tokenizer = spec["pre_tokenizer"] or {}
    last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])[-1]
    return bool(last.get("pattern") == {"Regex": guard_pattern(names)})


def refuse_leaks(backend: Backend, special: SpecialTokens, where: str) -> None:
    """Check that the names of special tokens in plain text are encoded as text.

    Args:
        backend: tokenizer to check; its ``encode_special_tokens`` is set.
        special: names of special tokens.
        where: what the error names, such as a path.

    Raises:
        DataError: one of them is encoded as the special token.
    """
    names = special.by_role()
    forbidden = {backend.token_to_id(name): name for role, name in names.items() if role != "unk"}
    probes = [probe for name in names.values() for probe in (name, f"a{name}b", f"a {name} b")]
    backend.encode_special_tokens = True
    for probe in probes:
        for leaked in forbidden.keys() & set(backend.encode(probe, add_special_tokens=False).ids):
            raise DataError(
                f"{where}: the text {probe!r} becomes the special token {forbidden[leaked]}; "
                "use a pre-tokenizer that splits punctuation"
            )

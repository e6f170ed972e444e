"""Schemes of labels of words: BIO, IOBES, BILOU, and labels without a scheme.

A scheme writes an entity's type with the position of the word in it, such as ``B-PER I-PER``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

OUTSIDE = "O"
"""Label of words that belong to no entity."""
ENTITY_METRICS = ("f1", "precision", "recall")
"""Metrics of entities; with the prefix ``token_``, of words."""
TOKEN_PREFIX = "token_"

_SCHEMES = ("BI", "BIES", "BILU", "BMES", "BMEW")
_AS_IOBES = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S", "W": "S"}
_BEFORE = re.compile(r"([BIELMSUWbi])[-_:](.+)", re.DOTALL)
_AFTER = re.compile(r"(.+)[-_:]([BIELMSUW])", re.DOTALL)


class SchemeError(ValueError):
    """Labels mix a scheme with something else."""


@cache
def entity_labels(labels: tuple[str, ...]) -> Mapping[str, str] | None:
    """Recognise the scheme of labels.

    The position may stand before the type (``B-PER``), after it (``PER-B``) or alone (``B``). BIO
    stands for IOB1 and IOB2, which conlleval's rules for the ends of entities both cover.

    Args:
        labels: the labels of a task.

    Returns:
        Each label in the form that conlleval reads, ``O`` or the positions B, I, E or S with a
        type; None: the labels have no scheme.

    Raises:
        SchemeError: some labels have a position and others have none, or the positions are of no
            scheme.
    """
    named = [label for label in labels if label != OUTSIDE]
    if not named:
        return None
    parsed: dict[str, tuple[str, str]] = {}
    for form in (_BEFORE, _AFTER):
        found = {label: match for label in named if (match := form.fullmatch(label))}
        if len(found) == len(named):
            position, type_ = (1, 2) if form is _BEFORE else (2, 1)
            parsed = {label: (m[position], m[type_]) for label, m in found.items()}
            break
    else:
        if set(named) <= set(_AS_IOBES) and "B" in named:
            parsed = {label: (label, "") for label in named}
        elif odd := _odd_label(named):
            raise SchemeError(
                f"{odd[0]!r} has a position in an entity, as in BIO, but {odd[1]!r} has none; "
                f"write every label but {OUTSIDE} with its position"
            )
        else:
            return None
    positions = {at.upper() for at, _ in parsed.values()}
    if not any(positions <= set(scheme) for scheme in _SCHEMES):
        raise SchemeError(
            f"the positions {', '.join(sorted(positions))} are of no scheme (BIO, IOBES, BILOU, "
            "BMES)"
        )
    as_iobes = {label: f"{_AS_IOBES[at.upper()]}-{name}" for label, (at, name) in parsed.items()}
    return {OUTSIDE: OUTSIDE, **as_iobes}


def entities(
    labels: tuple[str, ...], sentences: Sequence[Sequence[str]]
) -> set[tuple[str, int, int]]:
    """Return the entities of sentences, as conlleval finds them: type, first and last word.

    Args:
        labels: the labels of the task; they have a scheme.
        sentences: labels of the words of each sentence.
    """
    from seqeval.metrics.sequence_labeling import get_entities

    scheme = entity_labels(labels)
    assert scheme is not None
    return set(get_entities([[scheme[label] for label in tags] for tags in sentences]))


def _odd_label(named: Sequence[str]) -> tuple[str, str] | None:
    """Return a label that begins or ends with B or I as in BIO, and one that does not."""
    for form, group in ((_BEFORE, 1), (_AFTER, 2)):
        has = {label: match[group] for label in named if (match := form.fullmatch(label))}
        if {"B", "I"} & set(has.values()):
            return next(iter(has)), next(label for label in named if label not in has)
    return None

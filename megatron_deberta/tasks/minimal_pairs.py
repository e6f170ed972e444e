"""Minimal pairs of sentences: reading and accuracies.

Source: BLiMP, Warstadt et al. 2020, arXiv:1912.00582.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_deberta.errors import MissingInputError
from megatron_deberta.tasks.readers.records import string_of
from megatron_deberta.tasks.readers.tables import read_jsonl

_SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True, slots=True)
class MinimalPair:
    """An acceptable sentence and an unacceptable one that differs in one phenomenon.

    Attributes:
        good: the acceptable sentence.
        bad: the unacceptable sentence.
        paradigm: name of the phenomenon (BLiMP's ``UID``).
        field: linguistic field of the paradigm.
    """

    good: str
    bad: str
    paradigm: str
    field: str


@dataclass(frozen=True, slots=True)
class ParadigmScore:
    """Share of a paradigm's pairs whose acceptable sentence has the higher score."""

    paradigm: str
    field: str
    num_pairs: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class MinimalPairScores:
    """Accuracies of all pairs; chance is 0.5.

    Attributes:
        paradigms: by field and name.
    """

    paradigms: tuple[ParadigmScore, ...]

    @property
    def fields(self) -> dict[str, float]:
        """Mean accuracy of the paradigms of each linguistic field."""
        names = dict.fromkeys(score.field for score in self.paradigms)
        return {name: _mean(s for s in self.paradigms if s.field == name) for name in names}

    @property
    def accuracy(self) -> float:
        """Mean accuracy of all paradigms."""
        return _mean(self.paradigms)

    @property
    def num_pairs(self) -> int:
        """Number of pairs."""
        return sum(score.num_pairs for score in self.paradigms)


def read_minimal_pairs(data: str | os.PathLike[str], limit: int = 0) -> list[MinimalPair]:
    """Read minimal pairs in BLiMP's format.

    Args:
        data: folder of JSON Lines files (``.jsonl``, ``.jsonl.gz``), such as BLiMP's ``data``
            with one file per paradigm, or one such file. Each line has ``sentence_good``,
            ``sentence_bad``, ``UID`` and ``field``.
        limit: first pairs of each paradigm to read; 0: all.

    Raises:
        DataError: there is no such file, or a line is malformed; names file and line.
    """
    path = Path(data)
    if not path.exists():
        raise MissingInputError(f"{path}: no such folder; give the folder of BLiMP's .jsonl files")
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in files if file.name.endswith(_SUFFIXES)]
    if not files:
        raise MissingInputError(f"{path}: no {' or '.join(_SUFFIXES)} file; give BLiMP's folder")
    pairs: list[MinimalPair] = []
    counts: dict[str, int] = {}
    for place, values in (record for file in files for record in read_jsonl(file)):
        names = ("sentence_good", "sentence_bad", "UID", "field")
        good, bad, paradigm, field = (string_of(place, values, name) for name in names)
        counts[paradigm] = counts.get(paradigm, 0) + 1
        if not limit or counts[paradigm] <= limit:
            # BLiMP spells one field in two ways.
            pairs.append(MinimalPair(good, bad, paradigm, field.replace("/", "_")))
    return pairs


def score_minimal_pairs(
    pairs: Sequence[MinimalPair], is_correct: npt.NDArray[np.bool_]
) -> MinimalPairScores:
    """Compute the accuracy of each paradigm.

    Args:
        pairs: the pairs.
        is_correct: bool ``[pairs]``, whether the acceptable sentence has the higher score.
    """
    found: dict[tuple[str, str], list[bool]] = {}
    for pair, correct in zip(pairs, is_correct.tolist(), strict=True):
        found.setdefault((pair.field, pair.paradigm), []).append(correct)
    return MinimalPairScores(
        tuple(
            ParadigmScore(paradigm, field, len(hits), sum(hits) / len(hits))
            for (field, paradigm), hits in sorted(found.items())
        )
    )


def _mean(scores: Iterable[ParadigmScore]) -> float:
    accuracies = [score.accuracy for score in scores]
    return sum(accuracies) / len(accuracies)

"""Validation samples of a report: a row with its masks, and what fills them at each validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_deberta.report.run_folder import Record, RunFolder, is_number

MAX_VALIDATIONS = 10
"""Columns of a table; of more validations, evenly spaced ones."""
MAX_SAMPLES = 4
"""Rows of the validation set shown per run."""
_WORD_START = "▁"


@dataclass(frozen=True, slots=True)
class Fill:
    """What the model predicts for a mask at one validation.

    Attributes:
        text: most probable token.
        probability: its probability.
        is_right: whether it is the original token.
        others: further candidates with probabilities, as text.
    """

    text: str
    probability: float
    is_right: bool
    others: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a sample's text.

    Attributes:
        text: with a leading space where a word starts.
        number: of the mask, from 1; 0: not masked.
        input: token that the model sees there.
    """

    text: str
    number: int
    input: str


@dataclass(frozen=True, slots=True)
class SampleTable:
    """A row of the validation set.

    Attributes:
        sample: its global sample index.
        pieces: its text; masked tokens are the original ones.
        steps: steps of the validations shown.
        total: number of validations recorded.
        rows: of each mask, its number, original token, and prediction at each of ``steps``.
    """

    sample: int
    pieces: Sequence[Piece]
    steps: Sequence[int]
    total: int
    rows: Sequence[tuple[int, str, Sequence[Fill | None]]]


def sample_tables(run: RunFolder) -> tuple[list[SampleTable], int]:
    """Return the samples of a run, and the number of those that are damaged."""
    groups: dict[tuple[object, ...], dict[int, Record]] = {}
    damaged = 0
    for record in run.samples:
        for sample in record["samples"]:
            if not _is_sample(sample):
                damaged += 1
                continue
            masks = tuple((mask["position"], mask["token"]) for mask in sample["masks"])
            groups.setdefault((sample["sample"], masks), {})[record["step"]] = sample
    return [_table(found) for found in list(groups.values())[:MAX_SAMPLES]], damaged


def _is_sample(sample: object) -> bool:
    if not isinstance(sample, dict) or not is_number(sample.get("sample")):
        return False
    pieces, masks = sample.get("pieces"), sample.get("masks")
    if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
        return False
    return isinstance(masks, list) and all(_is_mask(mask, len(pieces)) for mask in masks)


def _is_mask(mask: object, length: int) -> bool:
    if not isinstance(mask, dict):
        return False
    position, predictions = mask.get("position"), mask.get("predictions")
    if not isinstance(position, int) or not 0 <= position < length:
        return False
    if not isinstance(mask.get("token"), str) or not isinstance(predictions, list):
        return False
    return bool(predictions) and all(map(_is_prediction, predictions))


def _is_prediction(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return isinstance(value[0], str) and is_number(value[1])


def _table(by_step: dict[int, Record]) -> SampleTable:
    """Arrange the validations of one sample."""
    known = sorted(by_step)
    places = np.unique(np.linspace(0, len(known) - 1, min(len(known), MAX_VALIDATIONS)).round())
    steps = [known[int(place)] for place in places]
    last = by_step[known[-1]]
    numbers = {mask["position"]: number for number, mask in enumerate(last["masks"], start=1)}
    tokens = {mask["position"]: mask["token"] for mask in last["masks"]}
    pieces = [
        Piece(_text(tokens.get(position, piece)), numbers.get(position, 0), _text(piece).strip())
        for position, piece in enumerate(last["pieces"])
    ]
    rows = [
        (number, _text(tokens[position]).strip(), [_fill(by_step[s], number - 1) for s in steps])
        for position, number in numbers.items()
    ]
    return SampleTable(int(last["sample"]), pieces, steps, len(known), rows)


def _fill(sample: Record, index: int) -> Fill:
    mask = sample["masks"][index]
    (text, probability), *others = mask["predictions"]
    rest = ", ".join(f"{_text(piece).strip()} {share:.1%}" for piece, share in others)
    return Fill(_text(text).strip() or text, probability, text == mask["token"], rest)


def _text(piece: str) -> str:
    """Return a piece of SentencePiece, or of byte-level BPE, as text."""
    return piece.replace(_WORD_START, " ").replace("Ġ", " ").replace("Ċ", "\n")

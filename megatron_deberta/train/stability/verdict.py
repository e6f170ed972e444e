"""Verdict about a step that was run again: a transient fault, a persistent one, or none.

A rank's losses and gradients of one update are recorded as checksums in the order of computation,
before they are summed over data-parallel ranks. The record of the same micro batches must be the
same at any time and on any data-parallel rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["transient", "persistent", "reproducible", "undecided"]

_TEXTS: dict[Kind, str] = {
    "transient": "a transient fault: the second run of the step did not repeat it",
    "persistent": "a persistent fault: another rank computes the same micro batches differently; "
    "exclude that node",
    "reproducible": "no fault of a device: other ranks compute the same; the data, the weights or "
    "the learning rate are the cause",
    "undecided": "the same rank computes the same again, and no other rank holds its weights, so "
    "the device and the data cannot be told apart",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A rank, its host and its device."""

    rank: int
    host: str
    device: str

    def __str__(self) -> str:
        """Return the text for messages."""
        return f"rank {self.rank} ({self.host}, {self.device})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What repeating a step has shown.

    Attributes:
        step: counted from 1.
        cause: why the step was run again.
        kind: ``transient``, ``persistent``, ``reproducible`` or ``undecided``.
        places: ranks that are suspected; several: one of them. Empty: none, or it is unknown which.
    """

    step: int
    cause: str
    kind: Kind
    places: tuple[Place, ...]

    def about_replicas(self, places: Sequence[Place]) -> Verdict:
        """Return the verdict about ranks whose replicas differ, given that of a later run.

        Args:
            places: the ranks.
        """
        if self.kind == "transient":
            # Two runs after the fault differ: it is still there.
            return replace(self, kind="persistent", places=self.places or tuple(places))
        if self.kind == "reproducible":
            # All ranks compute the same now.
            return replace(self, kind="transient", places=tuple(places))
        return self if self.places else replace(self, places=tuple(places))

    def __str__(self) -> str:
        """Return one line."""
        where = ""
        if self.places:
            one_of = "one of " if len(self.places) > 1 else ""
            where = f" on {one_of}{', '.join(map(str, self.places))}"
        name, colon, rest = _TEXTS[self.kind].partition(":")
        return f"step {self.step}: {self.cause}; run again: {name}{where}{colon}{rest}"


def diagnose(records: Tensor, tp_size: int, *, repeats: bool) -> tuple[Kind, tuple[int, ...]]:
    """Compare the records of all ranks.

    Args:
        records: int64 ``[W, R, N, 2]`` on the CPU: by rank, run and place in the computation, a
            checksum, and whether the norm is finite. The runs are the original, the same again,
            and, if R is 3, that with the micro batches of the data-parallel rank before.
        tp_size: tensor-parallel size; these ranks are consecutive.
        repeats: the second run of all ranks together failed again.

    Returns:
        The kind, and the ranks that are suspected.
    """
    num_runs = records.shape[1]
    sums, finite = records[..., 0], records[..., 1]
    if (sums[:, 0] != sums[:, 1]).any(-1).all():
        # Operators whose sums depend on their order, as on some GPUs: only flags are comparable.
        sums = finite
    if num_runs > 2:
        # By the rank whose micro batches they are.
        other_sums, other_finite = (part[:, 2].roll(-tp_size, 0) for part in (sums, finite))
        differs = sums[:, 1] != other_sums
        if differs.any():
            return "persistent", _wrong(differs, finite[:, 1] > 0, other_finite > 0, tp_size)
    changed = sums[:, 0] != sums[:, 1]
    if changed.any():
        return "transient", _earliest(changed)
    if not repeats:
        # Every rank computed the same, so it was in the exchange between them.
        return "transient", ()
    return ("reproducible" if num_runs > 2 else "undecided"), ()


def _earliest(differs: Tensor) -> tuple[int, ...]:
    """Return the ranks that differ first in the order of computation; [W, N] bool."""
    places = _first_places(differs)
    return tuple(rank for rank, place in enumerate(places) if place == min(places))


def _first_places(differs: Tensor) -> list[int]:
    """Return the first place at which each rank differs; the number of places if it does not."""
    none = differs.shape[1]
    order = torch.arange(none).expand_as(differs)
    return [int(place) for place in torch.where(differs, order, none).amin(-1)]


def _wrong(differs: Tensor, own: Tensor, other: Tensor, tp_size: int) -> tuple[int, ...]:
    """Return the ranks that compute wrong.

    Args:
        differs: [W, N] whether two ranks differ about the micro batches of each rank.
        own: [W, N] whether its own result is finite.
        other: [W, N] whether that of the next data-parallel rank is.
        tp_size: tensor-parallel size.
    """
    world_size = len(differs)
    votes: Counter[int] = Counter()
    for first in range(0, world_size, tp_size):
        places = _first_places(differs[first : first + tp_size])
        if min(places) == differs.shape[1]:
            continue
        for number, place in enumerate(places):
            # Within tensor-parallel ranks, a wrong value spreads to the others.
            if place > min(places):
                continue
            rank = first + number
            pair = (rank, (rank + tp_size) % world_size)
            flags = bool(own[rank, place]), bool(other[rank, place])
            for suspect, is_finite in zip(pair, flags, strict=True):
                if flags[0] == flags[1] or not is_finite:
                    votes[suspect] += 1 if flags[0] == flags[1] else 2
    most = max(votes.values())
    return tuple(sorted(rank for rank, count in votes.items() if count == most))

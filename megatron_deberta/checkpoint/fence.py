"""Fence of a run folder: a process that has lost the folder's lock cannot commit a checkpoint.

Rank 0 checks the lock before each commit. A process that is suspended between the check and the
commit finds its staging folder deleted: its name contains the number of the lock, and the next
holder deletes the staging folders of others before it reads the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _unlocked() -> None:
    """Check nothing: there is no lock."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Lock under which a process writes to a run folder.

    Attributes:
        number: number of the lock, the same on every rank; 0: there is none.
        check: called on rank 0 before each commit; does not return if the lock has been lost.
    """

    number: int = 0
    check: Callable[[], None] = _unlocked


UNLOCKED = Fence()

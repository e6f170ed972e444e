"""Progress reporting: the sections of a training run and the observer that is notified of them.

``cluster.watchdog.heartbeat`` implements the observer for hang detection and straggler reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class Section(IntEnum):
    """Part of the training loop that a rank is in; the values are part of the heartbeat file."""

    STARTUP = 0
    """Until the first batch is requested: imports, rendezvous, data, model, checkpoint."""
    DATA = 1
    """Waiting for the micro batches of a step."""
    STEP = 2
    """Forward, backward, update, and the collectives after it."""
    AFTER = 3
    """Sample log, metrics and replica checks."""
    EVALUATION = 4
    SAVE = 5
    END = 6
    """After the last step: closing files and process groups."""

    @property
    def label(self) -> str:
        """Name shown in messages."""
        return {0: "start-up", 3: "log", 6: "shutdown"}.get(self.value, self.name.lower())


class ProgressObserver:
    """Receives progress notifications of one rank; this base class only stores the section.

    Every rank of a run sends the same sequence of ``enter`` and ``mark`` calls.

    Attributes:
        current: the section that was entered last.
    """

    current = Section.STARTUP

    def enter(self, section: Section, step: int | None = None) -> None:
        """Report the start of a section.

        Args:
            section: the section.
            step: completed optimizer steps; None: unchanged.
        """
        self.current = section

    def mark(self) -> None:
        """Report progress within a section, such as a micro batch."""

    @contextmanager
    def section(self, section: Section) -> Iterator[None]:
        """Report a section for the duration of a context, then the previous one again."""
        before = self.current
        self.enter(section)
        yield
        self.enter(before)

    def add_times(self, *, steps: int = 0, data: int = 0, forward: int = 0, whole: int = 0) -> None:
        """Add completed steps and the nanoseconds spent on them.

        Args:
            steps: completed steps.
            data: waiting for batches.
            forward: forward passes, without collectives over data-parallel ranks.
            whole: whole steps, batches included.
        """

"""When local saves start, and when training waits for one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SaveSchedule:
    """Limits the steps since the last complete save to a number.

    A save starts so many steps before that limit as the last one took. If it is not complete at the
    limit, training waits for it. All inputs are equal on all ranks.

    Attributes:
        every: the limit; at least 1.
        safe: step of the newest complete save, or from which the run started.
        is_suspended: the last save failed or was given up: nothing is waited for until one is
            complete.
    """

    every: int
    safe: int
    is_suspended: bool = field(default=False, init=False)
    _next: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Start the first save in the middle, because its duration is unknown."""
        self._next = self.safe + self.every - self.every // 2

    def is_due(self, step: int) -> bool:
        """Return whether a save starts after ``step``."""
        return step >= self._next

    def must_wait(self, step: int) -> bool:
        """Return whether the next step has to wait for the save in progress."""
        return step - self.safe >= self.every and not self.is_suspended

    def started(self, step: int) -> None:
        """Record that a save has started, or that one is skipped because another is in progress."""
        self._next = step + self.every

    def finished(self, step: int, saved: int, *, is_complete: bool) -> None:
        """Record the end of a save.

        Args:
            step: the last step made when the end is seen.
            saved: step whose state was saved.
            is_complete: the save is complete and valid on all ranks.
        """
        self.is_suspended = not is_complete
        if is_complete:
            self.safe = saved
            self._next = saved + max(1, self.every - (step - saved))

    def give_up(self) -> None:
        """Wait no longer for the save in progress."""
        self.is_suspended = True

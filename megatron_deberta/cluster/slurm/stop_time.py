"""Worst case of the time from a stop signal to the end of a job attempt, from measured parts.

A signal that arrives just after a step costs the next step and a save; a save under way is the last
one, and a validation is interrupted after a batch. Both parts and the exit are in the job history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_deberta.cluster.profile import ClusterProfile
from megatron_deberta.errors import EXIT_REQUEUE, ConfigError

EXIT_SECONDS = 10.0
"""From the checkpoint to the end of the attempt, until a run has measured it."""


@dataclass(frozen=True, slots=True)
class StopTime:
    """Longest measured parts, in seconds."""

    step: float
    save: float
    exit: float

    @property
    def total(self) -> float:
        """Longest time from a signal to the end of the attempt."""
        return self.step + self.save + self.exit

    def __str__(self) -> str:
        """Return the total and its parts in seconds."""
        return (
            f"{self.total:.1f} s (longest step {self.step:.1f} s, save {self.save:.1f} s, exit "
            f"{self.exit:.1f} s)"
        )


def measured_stop_time(events: Sequence[Mapping[str, Any]]) -> StopTime | None:
    """Return the worst case according to a job history; None before the first checkpoint."""
    measured = ("save_seconds", "step_seconds")
    saves = [event for event in events if all(key in event for key in measured)]
    if not saves:
        return None
    exits = []
    saved_at: float | None = None
    for event in events:
        if event["event"] == "end" and event.get("code") == EXIT_REQUEUE and saved_at is not None:
            exits.append(event["time"] - saved_at)
        if event["event"] in ("start", "checkpoint"):
            saved_at = event["time"] if event["event"] == "checkpoint" else None
    return StopTime(
        step=max(event["step_seconds"] for event in saves),
        save=max(event["save_seconds"] for event in saves),
        exit=max(exits, default=EXIT_SECONDS),
    )


def check_stop_time(profile: ClusterProfile, measured: StopTime | None) -> None:
    """Check that a cluster leaves enough time between its signals and SIGKILL.

    Raises:
        ConfigError: it does not, by what the run has measured.
    """
    for key in ("signal_seconds", "preemption_grace_seconds"):
        seconds = getattr(profile, key)
        if measured is not None and 0 < seconds < measured.total:
            raise ConfigError(
                f"{key}={seconds} of the cluster profile is less than the {measured} that a stop "
                "of this run takes; raise it, or save faster"
            )

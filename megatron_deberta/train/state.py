"""Position of a run and results of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from megatron_deberta.engine.base import StepOutcome
from megatron_deberta.train.stability.guard import Skip


@dataclass(frozen=True, slots=True)
class TrainState:
    """Position of a run. There is no random state: randomness depends on step and sample only.

    Attributes:
        step: completed optimizer steps.
        consumed_samples: global samples of those steps.
    """

    step: int
    consumed_samples: int

    def advanced(self, num_samples: int) -> TrainState:
        """Return the state after one more step of ``num_samples`` samples."""
        return TrainState(self.step + 1, self.consumed_samples + num_samples)


class FolderLock(Protocol):
    """Lock of a run folder, and the job history in it (``cluster.run_lock``)."""

    @property
    def number(self) -> int:
        """Number of the lock, higher than those of all earlier holders; 0: not held."""

    def __enter__(self) -> object:
        """Take the lock."""

    def __exit__(self, *_: object) -> None:
        """Release the lock."""

    def check(self) -> None:
        """End this process if another one has taken the lock."""

    def record(
        self,
        event: Literal["resume", "checkpoint"],
        *,
        step: int,
        samples: int,
        **measured: float,
    ) -> None:
        """Add the position of training to the job history, if the run has one.

        Args:
            event: what has happened.
            step: completed steps.
            samples: position in the data after those steps.
            measured: durations in seconds.
        """

    def record_fault(
        self, *, step: int, verdict: str, places: Sequence[Mapping[str, int | str]]
    ) -> None:
        """Add a verdict about devices to the job history, if the run has one.

        Args:
            step: at which they computed.
            verdict: its kind; a node with a ``persistent`` fault is excluded from now on.
            places: ``rank``, ``host`` and ``device`` of each suspect.
        """


class Ending(Enum):
    """Why training stopped.

    Attributes:
        FINISHED: ``train.exit_step`` or ``train.steps`` is reached.
        PREEMPTED: a scheduler's signal arrived; another job resumes.
        INTERRUPTED: the user pressed Ctrl-C; the run resumes only when started again.
        STOPPED: the stop file was found; the run resumes only when started again.
        PHASE: the segment of a run with phases or batch ramp ends; training continues.
        ROLLBACK: too many updates were skipped: the run has to return to a checkpoint.
    """

    FINISHED = "finished"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    STOPPED = "stopped"
    PHASE = "phase"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step; the same on every rank, apart from ``forward_time``.

    Attributes:
        loss: the objective's first loss: mean over its targets in the global batch, in nats.
        learning_rate: learning rate of the update.
        outcome: result of the engine's step.
        metrics: the objective's further losses and accuracies, by name.
        skip: why the update was skipped; None if it was made.
        rollback: too many updates were skipped: the run has to return to a checkpoint.
        forward_time: this rank's forward passes completed since the last step, in nanoseconds.
    """

    loss: float
    learning_rate: float
    outcome: StepOutcome
    metrics: Mapping[str, float] = field(default_factory=dict)
    skip: Skip | None = None
    rollback: bool = False
    forward_time: int = field(default=0, compare=False)

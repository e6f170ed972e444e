"""Position of a run and results of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from megatron_deberta.data.batch import Batch
from megatron_deberta.engine.protocol import StepOutcome
from megatron_deberta.train.stability.guard import Skip


@dataclass(frozen=True, slots=True)
class TrainState:
    """Position of a run. There is no random state: randomness depends on step and sample only."""

    step: int
    """Completed optimizer steps."""
    consumed_samples: int
    """Global samples of those steps."""

    def advanced(self, num_samples: int) -> TrainState:
        """Return the state after one more step of ``num_samples`` samples."""
        return TrainState(self.step + 1, self.consumed_samples + num_samples)


class Ending(Enum):
    """Why training stopped."""

    FINISHED = "finished"
    """``train.exit_step`` or ``train.steps`` is reached."""
    INTERRUPTED = "interrupted"
    """A signal arrived; another job resumes."""
    STOPPED = "stopped"
    """The stop file was found; the run resumes only when started again."""
    ROLLBACK = "rollback"
    """Too many updates were skipped: the run has to return to a checkpoint."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of ``Trainer.run``."""

    ending: Ending
    state: TrainState
    """The position reached."""


@dataclass(frozen=True, slots=True)
class PairResult:
    """Next-sentence prediction on a global batch."""

    loss: float
    """Mean cross-entropy per pair, in nats; the objective adds it to the masked tokens'."""
    accuracy: float
    """Fraction of pairs classified correctly."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step; the same on every rank, apart from ``forward_time``."""

    loss: float
    """Mean cross-entropy over the masked tokens of the global batch, in nats."""
    learning_rate: float
    """Learning rate of the update."""
    outcome: StepOutcome
    """Result of the engine's step."""
    pairs: PairResult | None = None
    """None where rows are not pairs."""
    skip: Skip | None = None
    """Why the update was skipped; None if it was made."""
    rollback: bool = False
    """Too many updates were skipped: the run has to return to a checkpoint."""
    forward_time: int = field(default=0, compare=False)
    """This rank's forward passes completed since the last step, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Argument of hooks after a step."""

    state: TrainState
    """Position after the step."""
    batches: Sequence[Batch]
    """This rank's micro batches of the step."""
    result: StepResult
    ending: Ending | None
    """Set after the last step of this process."""
    save: bool = False
    """The save file requests a checkpoint."""

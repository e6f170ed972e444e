"""What changes from step to step, besides the engine.

Owns the run's position. Refuses random state: there is none, because everything random is a
function of the step and the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from megatron_deberta.data.batch import Batch
from megatron_deberta.engine.protocol import StepOutcome
from megatron_deberta.train.stability.guard import Skip


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run is."""

    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """Global samples of those steps."""

    def advanced(self, num_samples: int) -> TrainState:
        """The state one step of so many samples later."""
        return TrainState(self.step + 1, self.consumed_samples + num_samples)


class Ending(Enum):
    """Why a step is the last one of this process."""

    FINISHED = "finished"
    """``train.exit_step`` or ``train.steps`` is reached."""
    INTERRUPTED = "interrupted"
    """A signal asked to stop: another job continues."""
    STOPPED = "stopped"
    """The stop file asked to: nobody continues unless asked anew."""


@dataclass(frozen=True, slots=True)
class PairResult:
    """How well the next-sentence labels of a global batch are predicted."""

    loss: float
    """Mean cross-entropy a pair, in nats; the objective adds it to the masked tokens'."""
    accuracy: float
    """Share of pairs told right."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step computed; the same on every rank."""

    loss: float
    """Mean cross-entropy over the masked tokens of the global batch, in nats."""
    learning_rate: float
    """Rate of the update."""
    outcome: StepOutcome
    """What the engine did."""
    pairs: PairResult | None = None
    """Where rows are pairs."""
    skip: Skip | None = None
    """Why there was no update."""
    rollback: bool = False
    """Skipping updates does not help: the run has to go back."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What hooks are told after a step."""

    state: TrainState
    """After the step."""
    batches: Sequence[Batch]
    """This rank's micro batches of the step."""
    result: StepResult
    """What it computed."""
    ending: Ending | None
    """Set after the last step of this process."""
    save: bool = False
    """The save file asks for a checkpoint."""

"""Whether an update may be made: losses and gradients that are not finite, spikes, what follows.

Owns the window of the last updates, the limits that come from it and the memory of skipped steps.
Refuses collectives and tensors: it sees only numbers that are the same on every rank, so every rank
comes to the same answer, and so does a resumed run, because all of it goes into the checkpoint.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_deberta.config.schema import GuardConfig, RunConfig
from megatron_deberta.engine.protocol import StepOutcome

Skip = Literal["loss not finite", "gradient not finite", "loss spike", "gradient spike", "overflow"]
"""Why an update was not made; ``overflow`` is fp16 finding its loss scale, no cause to worry."""

LEAST_DEVIATION = 0.01
"""Share of the mean that counts as a standard deviation where the window is quieter than that."""
_TINY = 1e-30
"""Stands for a gradient norm of zero, which has no logarithm."""


@dataclass(slots=True)
class GuardState:
    """All a guard remembers: JSON types, and floats come back from JSON bit for bit."""

    losses: list[float] = field(default_factory=list)
    """Of the last updates that were made."""
    norms: list[float] = field(default_factory=list)
    """Of their gradients."""
    skips: list[int] = field(default_factory=list)
    """Recent steps (counted from 1) whose update was skipped, ``overflow`` aside."""
    rollbacks: int = 0
    """How often the run went back, in all."""
    vain_rollbacks: int = 0
    """The same since it last got beyond the trouble."""
    trouble_step: int = 0
    """The step from which it last went back."""


class Guard:
    """Judges updates.

    Args:
        config: limits.
        short_steps: ``data.short_steps``, after which losses are of another length of row and the
            window starts anew.
        is_fp16: gradients that are not finite are the loss scale's affair.
        state: what it remembers; it changes with every step.
    """

    def __init__(
        self,
        config: GuardConfig,
        *,
        short_steps: int = 0,
        is_fp16: bool = False,
        state: GuardState | None = None,
    ) -> None:
        self._config = config
        self._short_steps = short_steps
        self._is_fp16 = is_fp16
        self.state = state or GuardState()

    @classmethod
    def of_run(cls, config: RunConfig, state: GuardState | None = None) -> Guard:
        """The guard of a run, with what it remembers."""
        return cls(
            config.guard,
            short_steps=config.data.short_steps,
            is_fp16=config.precision.dtype == "fp16",
            state=state,
        )

    def check_loss(self, loss: float) -> Skip | None:
        """Whether a step's loss forbids its update; None allows it."""
        if not math.isfinite(loss):
            return "loss not finite"
        return "loss spike" if loss > self._limit(self.state.losses) else None

    def norm_limit(self) -> float:
        """Largest gradient norm with which an update is made.

        Norms are compared by their logarithms: they vary by factors, and with small batches their
        upper tail is so long that ordinary steps would be spikes otherwise.
        """
        logarithms = [math.log(max(norm, _TINY)) for norm in self.state.norms]
        return math.exp(self._limit(logarithms, scale=1.0))

    def check_outcome(self, outcome: StepOutcome) -> Skip | None:
        """Why the engine skipped an update whose loss was allowed; None if it did not."""
        if not outcome.skipped:
            return None
        if math.isfinite(outcome.grad_norm):
            return "gradient spike"
        return "overflow" if self._is_fp16 else "gradient not finite"

    def record(self, step: int, loss: float, outcome: StepOutcome, skip: Skip | None) -> None:
        """Remember a step.

        Args:
            step: counted from 1.
            loss: of the step.
            outcome: of the engine.
            skip: why there was no update.
        """
        state, window = self.state, self._config.spike_window
        if skip is None:
            state.losses = [*state.losses, loss][-window:]
            state.norms = [*state.norms, outcome.grad_norm][-window:]
        if step == self._short_steps:
            state.losses, state.norms = [], []
        state.skips = [known for known in state.skips if known > step - window]
        if skip not in (None, "overflow"):
            state.skips.append(step)
        if step > state.trouble_step + window and not state.skips:
            state.vain_rollbacks = 0

    @property
    def too_many_skips(self) -> bool:
        """Whether skipping does not help: the run has to go back, or to end."""
        return len(self.state.skips) >= self._config.max_skips

    @property
    def can_roll_back(self) -> bool:
        """Whether it may go back once more."""
        return self.state.vain_rollbacks < self._config.max_rollbacks

    @property
    def last_good_step(self) -> float:
        """Checkpoints up to this step are of before the present trouble; inf without any."""
        return self.state.skips[0] - 1 if self.state.skips else math.inf

    def _limit(self, window: Sequence[float], scale: float = 0.0) -> float:
        if self._config.spike_sigmas == 0 or len(window) < self._config.spike_warmup:
            return math.inf
        mean = statistics.fmean(window)
        deviation = max(statistics.pstdev(window, mean), LEAST_DEVIATION * (scale or abs(mean)))
        return mean + self._config.spike_sigmas * deviation

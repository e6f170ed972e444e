"""Numeric guard: skips updates with nonfinite or spiking losses and gradients.

Its inputs are numbers that are equal on every rank and its state is part of the checkpoint, so all
ranks, and resumed runs, make the same decisions.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_deberta.config.phases import segments
from megatron_deberta.config.schema import RunConfig, StabilityConfig
from megatron_deberta.distributed.control import all_reduce_max
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import StepOutcome
from megatron_deberta.parsing import Count

# Reason for skipping an update; ``overflow`` is the regular adjustment of fp16's loss scale
Skip = Literal["loss not finite", "gradient not finite", "loss spike", "gradient spike", "overflow"]

NONFINITE: tuple[Skip, ...] = ("loss not finite", "gradient not finite")
"""Reasons that may be a fault of a device."""

# Lower bound of the standard deviation, as a fraction of the mean
MIN_RELATIVE_DEVIATION = 0.01
# Replaces gradient norms of zero before taking logarithms
_MIN_NORM = 1e-30


@dataclass(slots=True)
class GuardState:
    """State of a guard, in JSON types; floats survive JSON bit for bit.

    Attributes:
        losses: losses of the last updates.
        norms: gradient norms of the last updates.
        skips: recent steps (counted from 1) whose update was skipped, without ``overflow``.
        rollbacks: rollbacks since the start of the run.
        vain_rollbacks: consecutive rollbacks without training past ``trouble_step``.
        trouble_step: step at which the last rollback started.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skips: list[Count] = field(default_factory=list)
    rollbacks: Count = 0
    vain_rollbacks: Count = 0
    trouble_step: Count = 0


@dataclass(slots=True)
class Guard:
    """Decides whether updates are made.

    Args:
        config: limits.
        is_fp16: nonfinite gradients count as overflows of the loss scale.
        change_steps: last steps of phases and of short rows, at which the window is cleared,
            because losses depend on the row length and the data.
        state: state to continue from; modified by ``record``.
    """

    config: StabilityConfig
    is_fp16: bool = False
    change_steps: frozenset[int] = frozenset()
    state: GuardState = field(default_factory=GuardState)

    @classmethod
    def of_run(cls, config: RunConfig, state: GuardState | None = None) -> Guard:
        """Build the guard of a run."""
        is_fp16 = config.precision.dtype == "fp16"
        parts = itertools.pairwise(segments(config))
        changes = frozenset(
            part.end
            for part, after in parts
            if part.stage != after.stage or part.phase != after.phase
        )
        return cls(config.stability, is_fp16, changes, state or GuardState())

    def check_loss(self, loss: float) -> Skip | None:
        """Return the reason to skip the update of a step with this loss, or None."""
        if not math.isfinite(loss):
            return "loss not finite"
        return "loss spike" if loss > self._limit(self.state.losses) else None

    def norm_limit(self) -> float:
        """Return the largest gradient norm with which an update is made.

        Logarithms of norms are compared, because with small batches the upper tail of the norms is
        so long that ordinary steps would count as spikes.
        """
        logarithms = [math.log(max(norm, _MIN_NORM)) for norm in self.state.norms]
        return math.exp(self._limit(logarithms, scale=1.0))

    def check_outcome(self, outcome: StepOutcome) -> Skip | None:
        """Return why the engine skipped an update whose loss was accepted, or None."""
        if not outcome.skipped:
            return None
        if math.isfinite(outcome.grad_norm):
            return "gradient spike"
        return "overflow" if self.is_fp16 else "gradient not finite"

    def record(self, step: int, loss: float, outcome: StepOutcome, skip: Skip | None) -> None:
        """Add a step to the state.

        Args:
            step: counted from 1.
            loss: the step's loss.
            outcome: the engine's result.
            skip: why the update was skipped; None if it was made.
        """
        state, window = self.state, self.config.spike_window
        if skip is None:
            state.losses = [*state.losses, loss][-window:]
            state.norms = [*state.norms, outcome.grad_norm][-window:]
        if step in self.change_steps:
            state.losses, state.norms = [], []
        state.skips = [skipped for skipped in state.skips if skipped > step - window]
        if skip not in (None, "overflow"):
            state.skips.append(step)
        if step > state.trouble_step + window and not state.skips:
            state.vain_rollbacks = 0

    @property
    def too_many_skips(self) -> bool:
        """Whether ``stability.max_skips`` is reached: the run has to roll back or to end."""
        return len(self.state.skips) >= self.config.max_skips

    @property
    def can_roll_back(self) -> bool:
        """Whether ``stability.max_rollbacks`` allows another rollback."""
        return self.state.vain_rollbacks < self.config.max_rollbacks

    @property
    def last_good_step(self) -> float:
        """Last step before the recent skips; inf without any."""
        return self.state.skips[0] - 1 if self.state.skips else math.inf

    def _limit(self, window: Sequence[float], scale: float = 0.0) -> float:
        sigmas = self.config.spike_sigmas
        if sigmas is None or len(window) < self.config.spike_warmup:
            return math.inf
        mean = statistics.fmean(window)
        deviation = max(
            statistics.pstdev(window, mean), MIN_RELATIVE_DEVIATION * (scale or abs(mean))
        )
        return mean + sigmas * deviation


class GradientHooks:
    """Context manager in which ``on_gradient`` is called with each gradient that backward computes.

    Args:
        parameters: canonical names and parameters; frozen ones are left out.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._parameters = [item for item in parameters if item[1].requires_grad]
        self._handles: list[RemovableHandle] = []

    def on_gradient(self, index: int, gradient: Tensor) -> None:
        """Record a gradient.

        Args:
            index: of its parameter.
            gradient: any shape, that of the parameter.
        """
        raise NotImplementedError

    def __enter__(self) -> None:
        """Register the hooks."""
        self._handles = [
            parameter.register_hook(functools.partial(self.on_gradient, index))
            for index, (_, parameter) in enumerate(self._parameters)
        ]

    def __exit__(self, *_: object) -> None:
        """Remove the hooks; what was recorded is kept."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class NonfiniteGradients(GradientHooks):
    """Checks gradients as backward computes them, without host synchronization.

    A check costs one pass over each gradient, so it is enabled only for steps that are likely to
    have nonfinite gradients.

    Args:
        module: the model, the same on all ranks.
        groups: the rank grid.
        enabled: False does nothing.
    """

    def __init__(self, module: nn.Module, groups: ProcessGroups, *, enabled: bool) -> None:
        super().__init__(module.named_parameters() if enabled else ())
        self._groups = groups
        self._checks: list[tuple[int, Tensor]] = []

    def on_gradient(self, index: int, gradient: Tensor) -> None:
        """Record whether a gradient is finite, without waiting for the device."""
        self._checks.append((index, torch.isfinite(gradient).all()))

    def first_nonfinite(self) -> str:
        """Describe the first nonfinite gradient of all ranks, in backward order. Collective.

        It belongs to the layer from which it spread to the others.
        """
        not_found = len(self._checks)
        place, index = next(
            (
                (place, index)
                for place, (index, is_finite) in enumerate(self._checks)
                if not is_finite.item()
            ),
            (not_found, 0),
        )
        # One number that sorts by place and also encodes parameter and rank.
        code = (place * (len(self._parameters) + 1) + index) * self._groups.world_size
        code += self._groups.rank
        negated = torch.tensor(-code, dtype=torch.int64, device=self._groups.device)
        code, rank = divmod(-int(all_reduce_max(negated, self._groups)), self._groups.world_size)
        place, index = divmod(code, len(self._parameters) + 1)
        if place == not_found:
            return "its origin was not recorded"
        return f"the first nonfinite gradient was that of {self._parameters[index][0]}, rank {rank}"

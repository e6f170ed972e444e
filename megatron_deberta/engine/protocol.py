"""Engine protocol: the interface of ``ReferenceEngine`` and ``DeepSpeedZeroEngine``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ParameterState:
    """One parameter as a checkpoint holds it.

    All three are fp32 CPU tensors of the parameter's local shape: this rank's tensor-parallel
    part, in full over data-parallel ranks.
    """

    weight: Tensor
    """The master weight."""
    exp_avg: Tensor
    """Adam's first moment; zeros before the first step."""
    exp_avg_sq: Tensor
    """Adam's second moment; zeros before the first step."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one optimizer step did."""

    grad_norm: float
    """2-norm of the model's gradient before clipping, loss scale taken out; inf if not finite."""
    skipped: bool
    """No weight, moment or Adam step has changed: the norm is not finite or above the limit."""
    loss_scale: float
    """Factor that this step's loss was multiplied by; 1 outside fp16."""


class ParameterPlacement(Protocol):
    """The part of ``sharding.spec.ParameterSpec`` that an engine looks at."""

    @property
    def dim(self) -> int | None:
        """Dimension split over tensor-parallel ranks; None for a replicated parameter."""
        ...


Placements = Mapping[str, ParameterPlacement]
"""Placement by canonical parameter name."""

FetchState = Callable[[str], ParameterState]
"""Gives the state of a canonical parameter name, this rank's tensor-parallel part."""


class Engine(Protocol):
    """Backward, reduction over data-parallel ranks, clipping and the optimizer.

    Gradients are summed over the micro batches between two steps and averaged over data-parallel
    ranks; the caller scales the loss. Every method but ``module`` and ``state_dict`` is collective.
    """

    @property
    def module(self) -> nn.Module:
        """The model to call; its ``named_parameters`` are the canonical names."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Backpropagate the loss (scalar) of one micro batch."""
        ...

    def step(self, learning_rate: float, norm_limit: float = math.inf) -> StepOutcome:
        """Clip and update with what was accumulated, then forget the gradients.

        Args:
            learning_rate: of this update.
            norm_limit: the update is skipped if the gradient's norm is above it; below 0 always.
                The same on every rank, as is the norm, so all of them do the same.

        Raises:
            LossScaleError: the gradient overflows fp16 at the smallest loss scale.
        """
        ...

    def gather_states(self) -> Iterator[tuple[str, ParameterState]]:
        """Yield every parameter's state, one at a time, in the module's order.

        Collective over data-parallel ranks: all of them must exhaust the iterator.
        """
        ...

    def load_states(self, fetch: FetchState) -> None:
        """Set every parameter and its moments; ``fetch`` is called in the module's order.

        Adam's step count becomes 0 until ``load_state_dict``. Zero moments make a fresh optimizer.
        """
        ...

    def state_dict(self) -> dict[str, int | float]:
        """The rest of the state: Adam's step count, the loss scale and its counters."""
        ...

    def load_state_dict(self, scalars: Mapping[str, int | float]) -> None:
        """Set what ``state_dict`` gave. To be called after ``load_states``."""
        ...

    def destroy(self) -> None:
        """Release hooks and buffers and restore environment variables that the engine has set.

        Call it on every way out of a run; the engine cannot be used afterwards.
        """
        ...

"""Interface of an objective: a training task as the trainer, validation and reports see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.model import DebertaBackbone, DropoutSeeds, RuntimeOptions

NO_COUNTS: Mapping[str, int] = MappingProxyType({})
"""Counts of an objective without counters."""


class LossPart(NamedTuple):
    """One of the losses whose means an objective adds up.

    Attributes:
        name: prefix of its metrics; empty for the first loss of an objective, which is recorded as
            ``loss`` and watched by the numeric guard.
        has_accuracy: predictions are counted as correct or not.
        weight: factor of its mean in the objective.
    """

    name: str = ""
    has_accuracy: bool = True
    weight: float = 1.0


class Sums(NamedTuple):
    """Result of a model with its loss on one micro batch.

    Attributes:
        losses: fp32 scalars, one per loss: sum over its targets.
        correct: int64 scalars, one per loss: number of correct predictions.
        outputs: predictions of the model's head, without gradient; None: the objective has none.
        counts: int64 scalars, one per counter of the objective.
    """

    losses: tuple[Tensor, ...]
    correct: tuple[Tensor, ...]
    outputs: Tensor | None = None
    counts: tuple[Tensor, ...] = ()

    def totals(self) -> Tensor:
        """Return losses, correct predictions and counts as one fp64 tensor, without gradient."""
        numbers = (*self.losses, *self.correct, *self.counts)
        return torch.stack([number.detach().double() for number in numbers])


@dataclass(frozen=True, slots=True)
class Update:
    """Forward, backward and update of some of an objective's losses.

    Attributes:
        parts: its losses; those of all updates, in order, are the objective's.
        counters: its counters, likewise.
        compute: called with the model, a micro batch, its dropout seeds, and its outputs in the
            update before (None in the first); returns these losses and counts.
        learning_rate: peak; None: ``optimizer.learning_rate``.
    """

    parts: tuple[LossPart, ...]
    counters: tuple[str, ...]
    compute: Callable[[nn.Module, Any, DropoutSeeds | None, Tensor | None], Sums]
    learning_rate: float | None = None


class Mean(NamedTuple):
    """A loss over many batches.

    Attributes:
        loss: mean per target.
        accuracy: fraction of correct predictions.
        num_targets: number of targets.
    """

    loss: float
    accuracy: float
    num_targets: int


class Objective(ABC):
    """A training task. Its model computes sums over targets, so results are layout-independent.

    The objective that is minimised is the sum of each loss's mean over the targets of the global
    batch.

    Args:
        config: the run.

    Attributes:
        model_class: model with loss. Called with a micro batch and ``DropoutSeeds`` or None, it
            returns sum of losses and number of correct predictions for each of ``parts``, then
            its ``counters``, then its outputs, if any, as a flat tuple of tensors. An objective
            without it overrides ``build_model``.
        loss_unit: unit of the recorded loss.
        step_loss_name: which loss of a training step is recorded as ``loss``, for people.
        validation_loss_name: likewise, of a validation.
        counters: names of further numbers that its metrics need, summed over the global batch.
        parts: the losses.
    """

    model_class: ClassVar[type[DebertaBackbone]]
    loss_unit: ClassVar[str] = "nats per masked token"
    step_loss_name: ClassVar[str] = "loss"
    validation_loss_name: ClassVar[str] = "loss"
    counters: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: RunConfig) -> None:
        """See the class."""
        self.config = config

    @property
    def parts(self) -> tuple[LossPart, ...]:
        """The losses of the objective."""
        return (LossPart(),)

    @property
    def updates(self) -> tuple[Update, ...]:
        """The updates of a step, made one after the other.

        More than one needs a model whose ``updated_separately`` names as many submodules.
        """

        def compute(
            module: nn.Module, batch: Any, seeds: DropoutSeeds | None, before: Tensor | None
        ) -> Sums:
            return self.sums(module(batch, seeds))

        return (Update(self.parts, self.counters, compute),)

    def build_model(self, options: RuntimeOptions) -> nn.Module:
        """Build the model with its loss."""
        return self.model_class(self.config.model, options)

    def complete_config(self, special_ids: Sequence[int]) -> RunConfig:
        """Return the run's config with what the objective needs to know of the tokenizer.

        Args:
            special_ids: ids of the special tokens.
        """
        return self.config

    @abstractmethod
    def count_targets(self, batch: Any) -> list[Tensor]:
        """Return int64 scalars: the number of targets of each loss in a micro batch."""

    def sums(self, result: Sequence[Tensor]) -> Sums:
        """Name the tensors that the model returned."""
        num = 2 * len(self.parts)
        end = num + len(self.counters)
        outputs = result[end] if len(result) > end else None
        counts = tuple(result[num:end])
        return Sums(tuple(result[0:num:2]), tuple(result[1:num:2]), outputs, counts)

    def step_loss(self, means: Sequence[Mean]) -> float:
        """Return the loss of a training step that is recorded and watched by the numeric guard."""
        return means[0].loss

    def step_metrics(
        self, means: Sequence[Mean], counts: Mapping[str, int] = NO_COUNTS
    ) -> dict[str, float]:
        """Return the metrics of a training step besides its loss, by name.

        Args:
            means: of each loss.
            counts: totals of the counters; empty if a loss is not finite.
        """
        metrics = {}
        for part, mean in zip(self.parts[1:], means[1:], strict=True):
            metrics[f"{part.name}_loss"] = mean.loss
            if part.has_accuracy:
                metrics[f"{part.name}_accuracy"] = mean.accuracy
        return metrics

    def validation_metrics(
        self, means: Sequence[Mean], counts: Mapping[str, int] = NO_COUNTS
    ) -> dict[str, float]:
        """Return the metrics of a validation, by name; ``loss`` is one of them."""
        first = {"loss": means[0].loss, "accuracy": means[0].accuracy}
        if not self.parts[0].has_accuracy:
            del first["accuracy"]
        return {**first, "num_targets": means[0].num_targets}

    def describe(self, metrics: dict[str, float]) -> str:
        """Format the metrics of a validation as one line."""
        return " | ".join(
            f"{name.replace('_', ' ')} {value:.4f}"
            for name, value in metrics.items()
            if name != "num_targets"
        )

    @abstractmethod
    def training_flops(self, sequence_length: float, micro_batch_size: int) -> float:
        """Count the FLOPs of forward and backward per token, without recomputation."""

    @abstractmethod
    def commands(self, run_dir: str, split: str = "test") -> list[str]:
        """Return the commands that use a trained model.

        Args:
            run_dir: the run folder, or an export.
            split: of a labelled task, the split to predict.
        """

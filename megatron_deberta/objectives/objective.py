"""Interface of an objective: a training task as the trainer, validation and reports see it."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.model import DebertaBackbone, DropoutSeeds, RuntimeOptions

NO_COUNTS: Mapping[str, int] = MappingProxyType({})
"""Counts of an objective without counters."""


class LossTerm(NamedTuple):
    """How one of an objective's losses counts.

    Attributes:
        weight: factor of its mean in the objective.
        has_accuracy: predictions are counted as correct or not.
    """

    weight: float = 1.0
    has_accuracy: bool = True


class LossSums(NamedTuple):
    """One loss of a micro batch.

    Attributes:
        loss: fp32 scalar: sum over its targets.
        correct: scalar: number of correct predictions, or the sum of their weights.
    """

    loss: Tensor
    correct: Tensor


class ModelLosses(NamedTuple):
    """Result of a model with its losses on one micro batch.

    Attributes:
        losses: by name; those of which the batch has no targets may be left out.
        counts: int64 scalars, by the name of the objective's counters.
        outputs: predictions of the model's head, without gradient; None: the objective has none.
    """

    losses: dict[str, LossSums]
    counts: dict[str, Tensor] = {}
    outputs: Tensor | None = None

    def totals(self, names: Iterable[str], counters: Iterable[str]) -> Tensor:
        """Return the sums of the named losses, then correct predictions, then counts.

        Returns:
            fp64, without gradient; 0 for what is not here.
        """
        zero = next(iter(self.losses.values())).loss.new_zeros(())
        sums = [self.losses.get(name, LossSums(zero, zero)) for name in names]
        numbers = [*(each.loss for each in sums), *(each.correct for each in sums)]
        numbers += [self.counts.get(name, zero) for name in counters]
        return torch.stack([number.detach().double() for number in numbers])


@dataclass(frozen=True, slots=True)
class Update:
    """Forward, backward and update of some of an objective's losses.

    Attributes:
        losses: their names; those of all updates, in order, are the objective's.
        counters: names of its counters, likewise.
        compute: called with the model, a micro batch, its dropout seeds, and its outputs in the
            update before (None in the first); returns these losses and counts.
        learning_rate: peak; None: ``optimizer.learning_rate``.
    """

    losses: tuple[str, ...]
    counters: tuple[str, ...]
    compute: Callable[[Any, Any, DropoutSeeds | None, Tensor | None], ModelLosses]
    learning_rate: float | None = None


class Mean(NamedTuple):
    """A loss over many batches.

    Attributes:
        loss: mean per target.
        accuracy: fraction of correct predictions.
        num_targets: number of targets, or the sum of their weights, rounded down.
    """

    loss: float
    accuracy: float
    num_targets: int


Means = Mapping[str, Mean]
"""Means of an objective's losses, by name."""


Counts = Mapping[str, int]
"""Totals of an objective's counters, by name."""


class Objective(ABC):
    """A training task. Its model computes sums over targets, so results are layout-independent.

    The objective that is minimised is the sum of each loss's mean over the targets of the global
    batch.

    Args:
        config: the run.

    Attributes:
        model_class: model with loss. Called with a micro batch and ``DropoutSeeds`` or None, it
            returns `ModelLosses`. An objective without it overrides ``build_model``.
        loss_unit: unit of the recorded loss.
        step_loss_name: which loss of a training step is recorded as ``loss``, for people.
        validation_loss_name: likewise, of a validation.
        counters: names of further numbers that its metrics need, summed over the global batch.
        formats: how ``describe`` writes metrics, by name, if not as name and number.
        losses: the losses by name.
    """

    model_class: ClassVar[type[DebertaBackbone]]
    loss_unit: ClassVar[str] = "nats per masked token"
    step_loss_name: ClassVar[str] = "loss"
    validation_loss_name: ClassVar[str] = "loss"
    counters: ClassVar[tuple[str, ...]] = ()
    formats: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: RunConfig) -> None:
        """See the class."""
        self.config = config

    @property
    @abstractmethod
    def losses(self) -> dict[str, LossTerm]:
        """The losses by name; the first one is recorded as ``loss``."""

    @property
    def updates(self) -> tuple[Update, ...]:
        """The updates of a step, made one after the other.

        More than one needs a model whose ``updated_separately`` names as many submodules.
        """
        losses = tuple(self.losses)
        return (Update(losses, self.counters, lambda model, batch, seeds, _: model(batch, seeds)),)

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
    def count_targets(self, batch: Any) -> dict[str, Tensor]:
        """Return the number of targets of each loss in a micro batch.

        Returns:
            Scalars: int64, or fp64 of a loss whose targets have weights, which are summed.
        """

    def step_loss(self, means: Means) -> float:
        """Return the loss of a training step that is recorded and watched by the numeric guard."""
        return next(iter(means.values())).loss

    def step_metrics(self, means: Means, counts: Counts = NO_COUNTS) -> dict[str, float]:
        """Return the metrics of a training step besides its loss, by name.

        Args:
            means: of each loss.
            counts: totals of the counters; empty if a loss is not finite.
        """
        metrics = {}
        for name, term in list(self.losses.items())[1:]:
            metrics[f"{name}_loss"] = means[name].loss
            if term.has_accuracy:
                metrics[f"{name}_accuracy"] = means[name].accuracy
        return metrics

    def validation_metrics(self, means: Means, counts: Counts = NO_COUNTS) -> dict[str, float]:
        """Return the metrics of a validation, by name; ``loss`` is one of them."""
        name, term = next(iter(self.losses.items()))
        mean = means[name]
        accuracy = {"accuracy": mean.accuracy} if term.has_accuracy else {}
        return {"loss": mean.loss, **accuracy, "num_targets": mean.num_targets}

    def describe(self, metrics: dict[str, float]) -> str:
        """Format the metrics of a validation as one line."""
        parts = []
        for name, value in metrics.items():
            if name in self.formats:
                parts.append(self.formats[name].format(value))
            elif name != "num_targets":
                parts.append(f"{name.replace('_', ' ')} {value:.4f}")
        return " | ".join(parts)

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


def export_command(run_dir: str) -> str:
    """Return the command that exports the model of a run folder to transformers' format."""
    folder, export = shlex.quote(run_dir), shlex.quote(str(Path(run_dir) / "hf"))
    return f"megatron-deberta convert --checkpoint {folder} --to hf --output {export}"

"""Interface of an objective: a training task as the trainer, validation and reports see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.model import DebertaBackbone, RuntimeOptions


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
    """

    losses: tuple[Tensor, ...]
    correct: tuple[Tensor, ...]
    outputs: Tensor | None = None


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
            its outputs, if any, as a flat tuple of tensors.
        parts: the losses.
    """

    model_class: ClassVar[type[DebertaBackbone]]

    def __init__(self, config: RunConfig) -> None:
        """See the class."""
        self.config = config

    @property
    def parts(self) -> tuple[LossPart, ...]:
        """The losses of the objective."""
        return (LossPart(),)

    def build_model(self, options: RuntimeOptions) -> DebertaBackbone:
        """Build the model with its loss."""
        return self.model_class(self.config.model, options)

    @abstractmethod
    def count_targets(self, batch: Any) -> list[Tensor]:
        """Return int64 scalars: the number of targets of each loss in a micro batch."""

    def sums(self, result: Sequence[Tensor]) -> Sums:
        """Name the tensors that the model returned."""
        num = 2 * len(self.parts)
        outputs = result[num] if len(result) > num else None
        return Sums(tuple(result[0:num:2]), tuple(result[1:num:2]), outputs)

    def step_metrics(self, means: Sequence[Mean]) -> dict[str, float]:
        """Return the metrics of a training step besides its loss, by name."""
        metrics = {}
        for part, mean in zip(self.parts[1:], means[1:], strict=True):
            metrics[f"{part.name}_loss"] = mean.loss
            if part.has_accuracy:
                metrics[f"{part.name}_accuracy"] = mean.accuracy
        return metrics

    def validation_metrics(self, means: Sequence[Mean]) -> dict[str, float]:
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
    def commands(self, run_dir: str) -> list[str]:
        """Return the commands that use a trained model."""

"""Common part of the objectives of labelled tasks: model with loss, SiFT, FLOPs, commands."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.data.batch import IGNORED_LABEL, TaskBatch
from megatron_deberta.model import DebertaForTask, DropoutSeeds, RuntimeOptions
from megatron_deberta.model.embeddings import Perturbation
from megatron_deberta.model.flops import training_flops_per_token
from megatron_deberta.model.task_models import (
    DebertaForRows,
    DebertaForSpans,
    DebertaForTokens,
)
from megatron_deberta.objectives.objective import LossSums, LossTerm, ModelLosses, Objective
from megatron_deberta.objectives.sift import Sift

TASK, SIFT = "task", "sift"
"""Names of the two losses."""

# Logit of what cannot be chosen. Finite, because its probability of 0 is multiplied with it.
MASKED_LOGIT = -1e9


class LabelledObjective(Objective):
    """Objective of a labelled task; SiFT adds a second loss."""

    loss_unit = "mean per labelled target"
    model_class: ClassVar[type[DebertaForTask]]
    squared_error: ClassVar[bool] = False

    @property
    def losses(self) -> dict[str, LossTerm]:
        """The task's loss and, with SiFT, the divergence under perturbation."""
        losses = {TASK: LossTerm(has_accuracy=not self.squared_error)}
        if weight := self.config.objective.sift_weight:
            losses[SIFT] = LossTerm(weight, has_accuracy=False)
        return losses

    @abstractmethod
    def loss(self, logits: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """Compute the loss of a micro batch.

        Args:
            logits: outputs of the head; ``[B, K]`` of rows, ``[B, N, K]`` of tokens.
            batch: on the device of the logits.

        Returns:
            Sum of the losses over labelled targets, fp32, and number of correct predictions, int64;
            scalars.
        """

    @abstractmethod
    def scored(self, batch: TaskBatch) -> Tensor:
        """Return which targets have a label, bool ``[T]``."""

    @abstractmethod
    def distributions(self, logits: Tensor, batch: TaskBatch) -> list[Tensor]:
        """Return the logits of the predicted distributions, one or more of ``[T, K]``."""

    def outputs(self, logits: Tensor, batch: TaskBatch) -> Tensor:
        """Return the predictions that `tasks.scoring` reads, fp32.

        Args:
            logits: outputs of the head; ``[B, K]`` of rows, ``[B, N, K]`` of tokens.
            batch: on the device of the logits.
        """
        return logits.detach().float()

    def build_model(self, options: RuntimeOptions) -> DebertaForTask:
        """Build the model with this objective's loss."""
        model = super().build_model(options)
        assert isinstance(model, TaskModel)
        model.objective = self
        model.sift = Sift.of_run(self.config)
        return model

    def count_targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        """Return the number of labelled targets, for each loss."""
        return dict.fromkeys(self.losses, self.scored(batch).sum())

    def training_flops(self, sequence_length: float, micro_batch_size: int) -> float:
        """Count the FLOPs of forward and backward per token, without recomputation.

        SiFT repeats both twice, the first time without the gradients of weights.
        """
        flops = training_flops_per_token(
            self.config.model, max(1, round(sequence_length)), micro_batch_size
        )
        return flops * (1 + 2 / 3 + 1) if SIFT in self.losses else flops

    def commands(self, run_dir: str, split: str = "test") -> list[str]:
        """Return the commands that predict and export."""
        folder, export = shlex.quote(run_dir), shlex.quote(str(Path(run_dir) / "hf"))
        finetune = self.config.finetune
        task, data, split = (
            shlex.quote(text or "") for text in (finetune.task, finetune.data, split)
        )
        return [
            f"megatron-deberta predict {task} --model {folder} --data {data} --split {split}",
            f"megatron-deberta convert --checkpoint {folder} --to hf --output {export}",
        ]


class TaskModel(DebertaForTask):
    """Base class of models with the loss of a labelled task."""

    objective: LabelledObjective
    sift: Sift | None = None

    def forward(self, batch: TaskBatch, seeds: DropoutSeeds | None = None) -> ModelLosses:
        """Compute the losses of a micro batch.

        Args:
            batch: on the model's device.
            seeds: dropout keys; None: no dropout and no SiFT, whose loss is then left out.

        Returns:
            The losses, and the outputs of the head.
        """
        packing = batch.packing

        def logits_of(seeds: DropoutSeeds | None, perturbation: Perturbation | None) -> Tensor:
            if packing is not None:
                return self.packed_logits(batch.inputs, packing, seeds)
            return self.logits(batch.inputs, seeds, perturbation)

        task, sift = self.objective, self.sift
        is_sift = sift is not None and seeds is not None
        logits = logits_of(seeds, Perturbation() if is_sift else None)
        losses = {TASK: LossSums(*task.loss(logits, batch))}
        outputs = task.outputs(logits, batch)
        if sift is not None and seeds is not None:
            divergence = sift(
                logits_of,
                lambda logits: task.distributions(logits, batch),
                logits,
                task.scored(batch),
                seeds,
                squared_error=task.squared_error,
            )
            losses[SIFT] = LossSums(divergence, torch.zeros_like(losses[TASK].correct))
        return ModelLosses(losses, outputs=outputs)


class RowsModel(TaskModel, DebertaForRows):
    """Head on the first token, with loss."""


class TokensModel(TaskModel, DebertaForTokens):
    """Head on every token, with loss."""


class SpansModel(TaskModel, DebertaForSpans):
    """Head for answer spans, with loss."""


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of cross-entropies (fp32) and the number of correct predictions.

    Args:
        logits: ``[T, K]``.
        labels: int64 ``[T]``, -100 = not scored.
    """
    logits = logits.float()
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return loss, (logits.argmax(-1) == labels).sum()

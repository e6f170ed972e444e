"""Objectives of labelled tasks, with the losses of transformers' heads, and SiFT."""

from __future__ import annotations

import math
import shlex
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.model import DebertaForTask, DropoutSeeds, RuntimeOptions
from megatron_deberta.model.embeddings import Perturbation
from megatron_deberta.model.flops import training_flops_per_token
from megatron_deberta.model.task_models import (
    DebertaForRows,
    DebertaForSpans,
    DebertaForTokens,
)
from megatron_deberta.objectives.objective import (
    LossSums,
    LossTerm,
    ModelLosses,
    Objective,
    export_command,
)
from megatron_deberta.objectives.sift import Sift
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL

TASK, SIFT = "task", "sift"
"""Names of the two losses."""

# Logit of what cannot be chosen. Finite, because its probability of 0 is multiplied with it.
MASKED_LOGIT = -1e9


class LabelledObjective(Objective):
    """Objective of a labelled task; SiFT adds a second loss."""

    loss_unit = "mean per labelled target"
    model_class: ClassVar[type[DebertaForTask]]
    squared_error: ClassVar[bool] = False
    _weights: Tensor | None = None

    def class_weights(self, device: torch.device) -> Tensor | None:
        """Return ``finetune.class_weights``, fp32 ``[K]``; None: all weights are 1."""
        values = self.config.finetune.class_weights
        if values and (self._weights is None or self._weights.device != device):
            self._weights = torch.tensor([float(value) for value in values], device=device)
        return self._weights

    @property
    def losses(self) -> dict[str, LossTerm]:
        """The task's loss and, with SiFT, the divergence under perturbation."""
        losses = {TASK: LossTerm(has_accuracy=not self.squared_error)}
        if weight := self.config.objective.sift_weight:
            losses[SIFT] = LossTerm(weight, has_accuracy=False)
        return losses

    def loss(self, logits: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """Compute the loss of a micro batch: cross-entropy, if a task has no other.

        Args:
            logits: outputs of the head; ``[B, K]`` of rows, ``[B, N, K]`` of tokens.
            batch: on the device of the logits.

        Returns:
            Scalars: sum of the losses over labelled targets, fp32, and number of correct
            predictions, int64. With class weights, both are sums of weighted targets, fp32.
        """
        return cross_entropy(
            self.distributions(logits, batch)[0],
            batch.labels.flatten(),
            self.class_weights(logits.device),
            self.config.finetune.focal_gamma,
        )

    def scored(self, batch: TaskBatch) -> Tensor:
        """Return which targets have a label, bool ``[T]``."""
        return batch.labels.flatten() != IGNORED_LABEL

    def distributions(self, logits: Tensor, batch: TaskBatch) -> list[Tensor]:
        """Return the logits of the predicted distributions, one or more of ``[T, K]``."""
        return [logits.flatten(0, -2)]

    def outputs(self, logits: Tensor, batch: TaskBatch) -> Tensor:
        """Return the predictions that `tasks.scoring` reads, fp32; ``[B]`` of one score per row.

        Args:
            logits: outputs of the head; ``[B, K]`` of rows, ``[B, N, K]`` of tokens.
            batch: on the device of the logits.
        """
        return logits.detach().float().squeeze(-1)

    def build_model(self, options: RuntimeOptions) -> DebertaForTask:
        """Build the model with this objective's loss."""
        model = super().build_model(options)
        assert isinstance(model, TaskModel)
        model.objective = self
        settings = self.config.objective
        if settings.sift_weight:
            model.sift = Sift(
                settings.sift_noise,
                settings.sift_step,
                settings.sift_inner,
                settings.sift_clean_gradient,
            )
        return model

    def count_targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        """Return the number of labelled targets for each loss; of weighted ones, their weight."""
        counts = dict.fromkeys(self.losses, self.scored(batch).sum())
        if (weights := self.class_weights(batch.labels.device)) is not None:
            counts[TASK] = target_weights(batch.labels.flatten(), weights).sum(dtype=torch.float64)
        return counts

    def training_flops(self, sequence_length: float, micro_batch_size: int) -> float:
        """Count the FLOPs of forward and backward per token, without recomputation.

        SiFT repeats both twice, the first time without the gradients of weights. With low-rank
        adapters there are hardly any gradients of weights.
        """
        flops = training_flops_per_token(
            self.config.model, max(1, round(sequence_length)), micro_batch_size
        )
        if self.config.finetune.lora_rank:
            flops *= 2 / 3
            return flops * 3 if SIFT in self.losses else flops
        return flops * (1 + 2 / 3 + 1) if SIFT in self.losses else flops

    def commands(self, run_dir: str, split: str = "test") -> list[str]:
        """Return the commands that predict and export."""
        finetune = self.config.finetune
        texts = (finetune.task, run_dir, finetune.data, split)
        task, folder, data, split = (shlex.quote(text or "") for text in texts)
        return [
            f"megatron-deberta predict {task} --model {folder} --data {data} --split {split}",
            export_command(run_dir),
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


def cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None, gamma: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum of cross-entropies (fp32) and the number of correct predictions.

    Args:
        logits: ``[T, K]``.
        labels: int64 ``[T]``, -100 = not scored.
        weights: ``[K]``, factor of the targets of each class in both sums; None: 1.
        gamma: see `focal_loss`.
    """
    logits = logits.float()
    correct = logits.argmax(-1) == labels
    hits = correct.sum() if weights is None else (target_weights(labels, weights) * correct).sum()
    if not gamma:
        loss = F.cross_entropy(logits, labels, weights, ignore_index=IGNORED_LABEL, reduction="sum")
        return loss, hits
    index = labels.clamp(min=0).unsqueeze(-1)
    # The log-odds of the right class
    others = logits.scatter(-1, index, -math.inf).logsumexp(-1)
    loss = focal_loss(logits.gather(-1, index).squeeze(-1) - others, gamma)
    factors = (labels != IGNORED_LABEL) if weights is None else target_weights(labels, weights)
    return (loss * factors).sum(), hits


def target_weights(labels: Tensor, weights: Tensor) -> Tensor:
    """Return the weight of each target's class, 0 if it is not scored.

    Args:
        labels: int64 ``[T]``.
        weights: ``[K]``.
    """
    return torch.where(labels == IGNORED_LABEL, 0.0, weights[labels.clamp(min=0)])


def focal_loss(log_odds: Tensor, gamma: float) -> Tensor:
    """Return ``-(1 - p) ** gamma * log(p)`` of right answers.

    Source: Lin et al. 2017, arXiv:1708.02002, Eq. 4. Its alpha is ``finetune.class_weights``.

    Args:
        log_odds: ``log(p / (1 - p))`` of the probability p, ``[...]``. The loss and its gradient
            are finite also where p is nearly 0 or 1.
        gamma: 0 is the cross-entropy.
    """
    loss = -F.logsigmoid(log_odds)
    return loss * (gamma * F.logsigmoid(-log_odds)).exp() if gamma else loss


class Classification(LabelledObjective):
    """One class per row, as transformers' sequence classification."""

    model_class = RowsModel


class Tokens(LabelledObjective):
    """One class per token, such as the first piece of each word."""

    model_class = TokensModel


class Regression(LabelledObjective):
    """Squared error of one score per row, as transformers' ``problem_type: regression``.

    NaN labels are not scored.
    """

    model_class = RowsModel
    squared_error = True

    def loss(self, logits: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of squared errors, and 0."""
        scored = self.scored(batch)
        error = logits[:, 0].float() - torch.where(scored, batch.labels, 0.0)
        return torch.where(scored, error.square(), 0.0).sum(), scored.new_zeros(()).long()

    def scored(self, batch: TaskBatch) -> Tensor:
        """Return which rows have a label."""
        return ~torch.isnan(batch.labels)


class Choices(LabelledObjective):
    """The right one of an example's rows; examples may differ in their number."""

    model_class = RowsModel

    def distributions(self, logits: Tensor, batch: TaskBatch) -> list[Tensor]:
        """Return the logits of the choices of each example, ``[E, C]``."""
        rows = batch.choice_rows
        assert rows is not None
        return [logits[:, 0].float()[rows.clamp(min=0)].masked_fill(rows < 0, MASKED_LOGIT)]


class Spans(LabelledObjective):
    """First and last token of the answer; the first token stands for no answer.

    The softmax is over the tokens of a row; transformers' own loss also counts padding, so there
    it depends on the longest row of the batch.
    """

    model_class = SpansModel

    def loss(self, logits: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """Return the sum over rows of both cross-entropies' mean, and the number of exact spans."""
        ends = self.distributions(logits, batch)
        losses = [cross_entropy(ends[side], batch.labels[:, side])[0] for side in (0, 1)]
        best = torch.stack([side.argmax(-1) for side in ends], -1)
        return (losses[0] + losses[1]) / 2, (best == batch.labels).all(-1).sum()

    def scored(self, batch: TaskBatch) -> Tensor:
        """Return which rows have a label."""
        return batch.labels[:, 0] != IGNORED_LABEL

    def distributions(self, logits: Tensor, batch: TaskBatch) -> list[Tensor]:
        """Return the logits of the first and of the last token, each ``[B, N]``."""
        masked = logits.float().masked_fill(~batch.inputs.is_token.unsqueeze(-1), MASKED_LOGIT)
        return list(masked.unbind(-1))

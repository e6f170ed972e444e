"""Objective of tasks with several labels per example: a binary decision for each label."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.objectives.labelled import LabelledObjective, RowsModel, focal_loss
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL


class Multilabel(LabelledObjective):
    """Binary cross-entropy of each label, as ``problem_type: multi_label_classification``.

    The loss of an example is the mean over all labels, as of ``BCEWithLogitsLoss``;
    ``finetune.class_weights`` are its ``pos_weight``. An example is predicted correctly if all of
    its labels are, at a probability of 0.5.
    """

    model_class = RowsModel

    def loss(self, logits: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of the examples' losses, and the number of correct examples."""
        scored, present = self.scored(batch), batch.labels == 1
        # Log-odds of the right decision: its cross-entropy is that of the label.
        log_odds = torch.where(present, logits, -logits).float()
        losses = focal_loss(log_odds, self.config.finetune.focal_gamma)
        if (weights := self.class_weights(logits.device)) is not None:
            losses = torch.where(present, weights * losses, losses)
        loss = torch.where(scored, losses.mean(-1), 0.0).sum()
        return loss, ((present == (logits > 0)).all(-1) & scored).sum()

    def scored(self, batch: TaskBatch) -> Tensor:
        """Return which examples have known labels."""
        return batch.labels[:, 0] != IGNORED_LABEL

    def distributions(self, logits: Tensor, batch: TaskBatch) -> list[Tensor]:
        """Return the logits of absence and presence of each label, each ``[B, 2]``."""
        return list(F.pad(logits.unsqueeze(-1), (1, 0)).unbind(1))

    def count_targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        """Return the number of examples with known labels: weights are of labels within them."""
        return dict.fromkeys(self.losses, self.scored(batch).sum())

"""Regression of rows: squared error of a score, as transformers' ``problem_type: regression``."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.objectives.labelled import LabelledObjective, RowsModel


class Regression(LabelledObjective):
    """One score per row; NaN labels are not scored."""

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

    def distributions(self, logits: Tensor, batch: TaskBatch) -> list[Tensor]:
        """Return the scores ``[B, 1]``."""
        return [logits]

    def outputs(self, logits: Tensor, batch: TaskBatch) -> Tensor:
        """Return the scores ``[B]``."""
        return super().outputs(logits[:, 0], batch)

"""Classification of rows: cross-entropy over classes, as transformers' sequence classification."""

from __future__ import annotations

from torch import Tensor

from megatron_deberta.data.batch import IGNORED_LABEL, TaskBatch
from megatron_deberta.objectives.labelled import (
    LabelledObjective,
    RowsModel,
    cross_entropy,
)


class Classification(LabelledObjective):
    """One class per row."""

    model_class = RowsModel

    def loss(self, logits: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of cross-entropies and the number of correct rows."""
        return cross_entropy(logits, batch.labels)

    def scored(self, batch: TaskBatch) -> Tensor:
        """Return which rows have a label."""
        return batch.labels != IGNORED_LABEL

    def distributions(self, logits: Tensor, batch: TaskBatch) -> list[Tensor]:
        """Return the logits of the classes."""
        return [logits]

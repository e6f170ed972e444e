"""Multiple choice: cross-entropy over one logit per choice; examples may differ in their number."""

from __future__ import annotations

from torch import Tensor

from megatron_deberta.data.batch import IGNORED_LABEL, TaskBatch
from megatron_deberta.objectives.labelled import (
    MASKED_LOGIT,
    LabelledObjective,
    RowsModel,
    cross_entropy,
)


class Choices(LabelledObjective):
    """The right one of an example's rows."""

    model_class = RowsModel

    def loss(self, logits: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of cross-entropies and the number of correct examples."""
        return cross_entropy(self.distributions(logits, batch)[0], batch.labels)

    def scored(self, batch: TaskBatch) -> Tensor:
        """Return which examples have a label."""
        return batch.labels != IGNORED_LABEL

    def distributions(self, logits: Tensor, batch: TaskBatch) -> list[Tensor]:
        """Return the logits of the choices of each example, ``[E, C]``."""
        rows = batch.choice_rows
        assert rows is not None
        return [logits[:, 0].float()[rows.clamp(min=0)].masked_fill(rows < 0, MASKED_LOGIT)]

    def outputs(self, logits: Tensor, batch: TaskBatch) -> Tensor:
        """Return the logit of each row, ``[B]``."""
        return super().outputs(logits[:, 0], batch)

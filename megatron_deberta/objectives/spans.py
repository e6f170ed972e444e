"""Answer spans: cross-entropies of the first and the last token, as transformers' span head.

The softmax is over the tokens of a row; transformers' own loss also counts padding, so there it
depends on the longest row of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_deberta.data.batch import IGNORED_LABEL, TaskBatch
from megatron_deberta.objectives.labelled import (
    MASKED_LOGIT,
    LabelledObjective,
    SpansModel,
    cross_entropy,
)


class Spans(LabelledObjective):
    """First and last token of the answer; the first token stands for no answer."""

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

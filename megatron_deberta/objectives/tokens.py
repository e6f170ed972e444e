"""Classification of tokens: cross-entropy at labelled tokens, as transformers' token head."""

from __future__ import annotations

from torch import Tensor

from megatron_deberta.data.batch import IGNORED_LABEL, TaskBatch
from megatron_deberta.objectives.labelled import (
    LabelledObjective,
    TokensModel,
    cross_entropy,
)


class Tokens(LabelledObjective):
    """One class per token, such as the first piece of each word."""

    model_class = TokensModel

    def loss(self, logits: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of cross-entropies and the number of correct tokens."""
        return cross_entropy(logits.flatten(0, 1), batch.labels.flatten())

    def scored(self, batch: TaskBatch) -> Tensor:
        """Return which tokens have a label."""
        return batch.labels.flatten() != IGNORED_LABEL

    def distributions(self, logits: Tensor, batch: TaskBatch) -> list[Tensor]:
        """Return the logits of the classes of all tokens, ``[B * N, K]``."""
        return [logits.flatten(0, 1)]

"""Objective of re-ranking: a score per passage of a query, with losses of learning to rank.

Sources: RankNet (Burges et al. 2005), ListNet (Cao et al. 2007, the probability of being first),
softmax cross-entropy (Bruch et al. 2019, "An Analysis of the Softmax Cross Entropy Loss").
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.objectives.labelled import MASKED_LOGIT, TASK, Choices


class Reranking(Choices):
    """Scores of passages, trained with ``finetune.ranking_loss``.

    A target is a passage (``bce``), a pair of passages of different relevance (``ranknet``), or a
    query (``listnet``, ``softmax``).
    """

    def loss(self, logits: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of targets, and the number of right ones.

        Right is a passage on its side of 0, a pair in order, or a query whose first passage none
        exceeds in relevance.
        """
        (scores,) = self.distributions(logits, batch)
        labels = _relevance(batch)
        known = labels.nan_to_num(0.0)
        kind = self.config.finetune.ranking_loss
        if kind == "bce":
            losses = F.binary_cross_entropy_with_logits(scores, known, reduction="none")
            is_right = (scores > 0) == (known > 0.5)
        elif kind == "ranknet":
            margin = scores.unsqueeze(-1) - scores.unsqueeze(-2)
            losses, is_right = F.softplus(-margin), margin > 0
        else:
            # Passages that only fill the list get the probability 0.
            target = labels.nan_to_num(MASKED_LOGIT).softmax(-1)
            if kind == "softmax":
                target = known / known.sum(-1, keepdim=True).clamp(
                    min=torch.finfo(known.dtype).tiny
                )
            losses = -(target * F.log_softmax(scores, -1)).sum(-1)
            first = scores.argmax(-1, keepdim=True)
            is_right = known.gather(-1, first)[..., 0] == known.amax(-1)
        targets = self._targets(labels)
        return torch.where(targets, losses, 0.0).sum(), (is_right & targets).sum()

    def count_targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        """Return the number of targets, for each loss."""
        return super().count_targets(batch) | {TASK: self._targets(_relevance(batch)).sum()}

    def scored(self, batch: TaskBatch) -> Tensor:
        """Return which queries have labels."""
        return ~_relevance(batch).isnan().all(-1)

    def _targets(self, labels: Tensor) -> Tensor:
        """Return which places of the loss are targets; comparisons with NaN are False."""
        kind = self.config.finetune.ranking_loss
        if kind == "bce":
            return ~labels.isnan()
        if kind == "ranknet":
            return labels.unsqueeze(-1) > labels.unsqueeze(-2)
        # The softmax of the relevance is defined where no passage is relevant, too.
        return (labels >= 0).any(-1) if kind == "listnet" else (labels > 0).any(-1)


def _relevance(batch: TaskBatch) -> Tensor:
    """Return the relevance of the passages of each query, ``[E, C]``; NaN: none."""
    rows = batch.choice_rows
    assert rows is not None
    return batch.labels[rows.clamp(min=0)].masked_fill(rows < 0, torch.nan)

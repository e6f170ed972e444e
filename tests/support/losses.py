"""Losses for tests: the twin of a model's own loss, and what a faulty device would make of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_deberta.objectives import ModelLosses
from megatron_deberta.ops.cross_entropy import CrossEntropy, Draw


class PlainTokenLoss(nn.Module):
    """The slow twin of ``model.heads.TokenLoss``: all logits, and torch's cross-entropy."""

    def forward(
        self,
        states: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        *,
        reduction: str = "sum",
        draw: Draw | None = None,
    ) -> CrossEntropy:
        """Compute the loss; arguments and result as of ``TokenLoss``."""
        logits = functional.linear(states, weight, bias)
        loss = functional.cross_entropy(logits.float(), labels, reduction=reduction)
        samples = None
        if draw is not None:
            with torch.no_grad():
                samples = draw(logits, slice(None), 0)[1]
        return CrossEntropy(loss, (logits.argmax(-1) == labels).sum(), samples)


def with_first_loss(result: ModelLosses, change: Callable[[Tensor], Tensor]) -> ModelLosses:
    """Return a result whose first loss is changed."""
    (name, first), *_ = result.losses.items()
    changed = first._replace(loss=change(first.loss))
    return result._replace(losses={**result.losses, name: changed})

"""Changes of the losses that a model returns, as a faulty device would make them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron_deberta.objectives import ModelLosses


def with_first_loss(result: ModelLosses, change: Callable[[Tensor], Tensor]) -> ModelLosses:
    """Return a result whose first loss is changed."""
    (name, first), *_ = result.losses.items()
    changed = first._replace(loss=change(first.loss))
    return result._replace(losses={**result.losses, name: changed})

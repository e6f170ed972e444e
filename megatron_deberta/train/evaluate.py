"""Validation: loss, perplexity and masked accuracy over the same batches every time.

Owns the sums over batches and ranks. Refuses to choose the batches (``data.loader``) or to write
the result (``hooks.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from megatron_deberta.data.batch import IGNORED_LABEL, Batch
from megatron_deberta.parallel.topology import ProcessGroups
from megatron_deberta.train.step import forward, sum_over_batch_ranks


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How well masked tokens are predicted; the same on every rank."""

    loss: float
    """Mean cross-entropy a masked token, in nats."""
    perplexity: float
    """exp(loss); inf where that overflows."""
    masked_accuracy: float
    """Share of masked tokens whose most likely prediction is right."""
    num_targets: int
    """Masked tokens seen."""


def evaluate(module: nn.Module, batches: Iterable[Batch], groups: ProcessGroups) -> Evaluation:
    """Validate without dropout. Collective over all ranks.

    Args:
        module: a model with its loss.
        batches: this rank's share, as many on every rank.
        groups: the rank grid.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=groups.device)
    module.eval()
    with torch.no_grad():
        for batch in batches:
            batch = batch.to(groups.device)
            loss_sum, right = forward(module, batch)
            targets = (batch.labels != IGNORED_LABEL).sum()
            sums += torch.stack([loss_sum.double(), right.double(), targets.double()])
    module.train()
    loss_sum, right, targets = sum_over_batch_ranks(sums, groups).tolist()
    loss = loss_sum / max(targets, 1.0)
    return Evaluation(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        masked_accuracy=right / max(targets, 1.0),
        num_targets=int(targets),
    )

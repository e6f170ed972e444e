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
from megatron_deberta.distributed.topology import ProcessGroups
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
    next_sentence_loss: float | None = None
    """Mean cross-entropy a pair, in nats; None where rows are not pairs."""
    next_sentence_accuracy: float | None = None
    """Share of pairs told right."""


def evaluate(module: nn.Module, batches: Iterable[Batch], groups: ProcessGroups) -> Evaluation:
    """Validate without dropout. Collective over all ranks.

    Args:
        module: a model with its loss.
        batches: this rank's share, as many on every rank.
        groups: the rank grid.
    """
    sums = torch.zeros(6, dtype=torch.float64, device=groups.device)
    module.eval()
    with torch.no_grad():
        for batch in batches:
            batch = batch.to(groups.device)
            found = forward(module, batch)
            targets = (batch.labels != IGNORED_LABEL).sum()
            sums[:3] += torch.stack([found.loss.double(), found.correct.double(), targets.double()])
            if found.pair_loss is not None and found.pair_correct is not None:
                assert batch.next_sentence_labels is not None
                rows = (batch.next_sentence_labels != IGNORED_LABEL).sum()
                numbers = [found.pair_loss.double(), found.pair_correct.double(), rows.double()]
                sums[3:] += torch.stack(numbers)
    module.train()
    loss_sum, right, targets, *pairs = sum_over_batch_ranks(sums, groups).tolist()
    loss = loss_sum / max(targets, 1.0)
    pair_loss, pairs_right, num_pairs = pairs
    return Evaluation(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        masked_accuracy=right / max(targets, 1.0),
        num_targets=int(targets),
        next_sentence_loss=pair_loss / num_pairs if num_pairs else None,
        next_sentence_accuracy=pairs_right / num_pairs if num_pairs else None,
    )

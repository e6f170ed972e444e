"""Validation: loss, perplexity and masked accuracy over a fixed set of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from megatron_deberta.data.batch import IGNORED_LABEL, Batch
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.train.step import forward, sum_over_batch_ranks


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Validation metrics; the same on every rank.

    Attributes:
        loss: mean cross-entropy per masked token, in nats.
        perplexity: exp(loss); inf where that overflows.
        masked_accuracy: fraction of masked tokens whose most likely prediction is correct.
        num_targets: number of masked tokens.
        next_sentence_loss: mean cross-entropy per pair, in nats; None where rows are not pairs.
        next_sentence_accuracy: fraction of pairs classified correctly.
    """

    loss: float
    perplexity: float
    masked_accuracy: float
    num_targets: int
    next_sentence_loss: float | None = None
    next_sentence_accuracy: float | None = None


def never() -> bool:
    """Return that nobody has asked to stop."""
    return False


def evaluate(
    module: nn.Module,
    batches: Iterable[Batch],
    groups: ProcessGroups,
    must_stop: Callable[[], bool] = never,
) -> Evaluation | None:
    """Validate without dropout. Collective over all ranks.

    Args:
        module: a model with its loss.
        batches: this rank's batches; the same number on every rank.
        groups: the rank grid.
        must_stop: called before each batch, with the same result on every rank.

    Returns:
        The metrics; None: told to stop before the last batch.
    """
    sums = torch.zeros(6, dtype=torch.float64, device=groups.device)
    module.eval()
    with torch.no_grad():
        for batch in batches:
            if must_stop():
                module.train()
                return None
            batch = batch.to(groups.device)
            result = forward(module, batch)
            targets = (batch.labels != IGNORED_LABEL).sum()
            numbers = [result.loss, result.correct, targets]
            if result.pair_loss is not None and result.pair_correct is not None:
                assert batch.next_sentence_labels is not None
                rows = (batch.next_sentence_labels != IGNORED_LABEL).sum()
                numbers += [result.pair_loss, result.pair_correct, rows]
            sums[: len(numbers)] += torch.stack([number.double() for number in numbers])
    module.train()
    loss_sum, correct, targets, *pairs = sum_over_batch_ranks(sums, groups).tolist()
    loss = loss_sum / max(targets, 1.0)
    pair_loss, pairs_correct, num_pairs = pairs
    return Evaluation(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        masked_accuracy=correct / max(targets, 1.0),
        num_targets=int(targets),
        next_sentence_loss=pair_loss / num_pairs if num_pairs else None,
        next_sentence_accuracy=pairs_correct / num_pairs if num_pairs else None,
    )

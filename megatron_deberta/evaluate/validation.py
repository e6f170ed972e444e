"""Validation: mean losses and accuracies over a fixed set of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from megatron_deberta.data.batch import MicroBatch
from megatron_deberta.distributed.control import sum_over_batch_ranks
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.objectives import Mean, ModelLosses, Objective
from megatron_deberta.tasks.class_scores import ClassScores


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of a validation; the same on every rank.

    Attributes:
        metrics: by name, as recorded in ``metrics.jsonl``.
        text: what is shown.
        class_scores: scores by class of a labelled task that has classes, on rank 0 only.
    """

    metrics: dict[str, float]
    text: str = ""
    class_scores: ClassScores | None = None


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients; the module has its mode of before afterwards."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)


def never() -> bool:
    """Return False: the default where no stop can be requested."""
    return False


def evaluate(
    module: nn.Module,
    batches: Iterable[MicroBatch],
    groups: ProcessGroups,
    objective: Objective,
    should_abort: Callable[[], bool] = never,
    collect: Callable[[MicroBatch, Tensor], None] | None = None,
) -> Evaluation | None:
    """Validate without dropout. Collective over all ranks.

    Args:
        module: the objective's model with its loss.
        batches: this rank's batches; the same number on every rank.
        groups: the rank grid.
        objective: the training task.
        should_abort: called before each batch, with the same result on every rank.
        collect: called with each batch and the outputs of the model, any shape; None: nothing.

    Returns:
        The metrics; None: told to stop before the last batch.
    """
    names, counters = tuple(objective.losses), objective.counters
    sums = torch.zeros(3 * len(names) + len(counters), dtype=torch.float64, device=groups.device)
    with evaluation_mode(module):
        for batch in batches:
            if should_abort():
                return None
            batch = batch.to(groups.device)
            result: ModelLosses = module(batch, None)
            found = objective.count_targets(batch)
            targets = torch.stack([found[name] for name in names]).double()
            sums += torch.cat([targets, result.totals(names, counters)])
            if collect is not None and result.outputs is not None:
                collect(batch, result.outputs)
    read = iter(sum_over_batch_ranks(sums, groups).tolist())
    rows = [list(islice(read, len(names))) for _ in range(3)]
    means = {
        name: Mean(loss / (count or 1.0), correct / (count or 1.0), int(count))
        for name, count, loss, correct in zip(names, *rows, strict=True)
    }
    counts = dict(zip(counters, map(int, read), strict=True))
    metrics = objective.validation_metrics(means, counts)
    return Evaluation(metrics, objective.describe(metrics))

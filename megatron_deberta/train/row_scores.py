"""Log-probabilities of tokens of rows, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from megatron_deberta.data import Integers
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.train.evaluate import never
from megatron_deberta.train.step import sum_over_batch_ranks


class ScoredRows(Protocol):
    """Rows with tokens to predict."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""

    def batches(self, tokens: int, dp_size: int) -> list[Integers]:
        """Divide the rows into batches of equal length.

        Args:
            tokens: maximum tokens of a batch, unless one row has more.
            dp_size: the number of batches is a multiple of this; extra ones are empty.

        Returns:
            Row numbers of each batch.
        """

    def batch(self, rows: Integers, multiple: int = 1) -> Batch:
        """Build the batch of some rows of equal length; of no rows, one whose score is not used.

        Args:
            rows: row numbers, which are the batch's ``sample_index``.
            multiple: N is a multiple of this.
        """


def batches_by_size(sizes: Integers, tokens: int, dp_size: int) -> list[Integers]:
    """Divide rows into batches of equal length, as `ScoredRows.batches`.

    Args:
        sizes: int64 ``[rows]``, tokens of each row.
        tokens: maximum tokens of a batch, unless one row has more.
        dp_size: the number of batches is a multiple of this; extra ones are empty.
    """
    found: list[Integers] = []
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        most = max(1, tokens // int(size))
        found += [rows[first : first + most] for first in range(0, len(rows), most)]
    found += [np.empty(0, np.int64)] * (-len(found) % dp_size)
    return found


def score_rows(
    module: nn.Module,
    rows: ScoredRows,
    groups: ProcessGroups,
    tokens_per_batch: int,
    *,
    multiple: int = 1,
    must_stop: Callable[[], bool] = never,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> npt.NDArray[np.float64] | None:
    """Sum the log-probabilities of each row's targets. Collective over all ranks.

    Only targets are decoded. Data-parallel ranks divide the rows; the batches do not depend on the
    layout.

    Args:
        module: `objectives.MaskedLanguageModel`.
        rows: the rows.
        groups: the rank grid.
        tokens_per_batch: maximum tokens of a forward pass.
        multiple: row lengths are padded to a multiple of this (sequence parallelism).
        must_stop: called before each batch, with the same result on every rank.
        advance: called with the batches done and their number.

    Returns:
        ``[rows]`` in nats; None: told to stop.
    """
    scores = torch.zeros(rows.num_rows, dtype=torch.float64, device=groups.device)
    batches = rows.batches(tokens_per_batch, groups.dp_size)
    own = batches[groups.dp_rank :: groups.dp_size]
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            for done, numbers in enumerate(own, start=1):
                if must_stop():
                    return None
                batch = rows.batch(numbers, multiple).to(groups.device)
                (tokens,) = module(batch, None, reduction="none").losses.values()
                losses = tokens.loss.view(batch.labels.shape)
                if numbers.size:
                    scores[batch.sample_index] = -losses.double().sum(1)
                advance(done, len(own))
    finally:
        module.train(was_training)
    values: npt.NDArray[np.float64] = sum_over_batch_ranks(scores, groups).cpu().numpy()
    return values

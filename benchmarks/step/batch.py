"""The batch that all sides of a comparison take: same tokens, same masks, no padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.data.batch import Batch

MASKED_SHARE = 0.15


@dataclass(frozen=True)
class StepBatch:
    """Rows without padding, each with the same number of targets.

    Attributes:
        input_ids: int64 ``[B, N]`` after masking.
        masked_positions: int64 ``[B, M]``, ascending places in the row.
        labels: int64 ``[B, M]``, the tokens that stood there.
        samples: int64 ``[B]``, row numbers; they key our dropout.
    """

    input_ids: Tensor
    masked_positions: Tensor
    labels: Tensor
    samples: Tensor

    def split(self, parts: int) -> list[StepBatch]:
        """The rows in ``parts`` micro batches of equal size."""
        columns = (self.input_ids, self.masked_positions, self.labels, self.samples)
        return [
            StepBatch(*part)
            for part in zip(*(column.chunk(parts) for column in columns), strict=True)
        ]

    def unpadded(self) -> Batch:
        """The rows as our models take them."""
        real = torch.ones_like(self.input_ids, dtype=torch.bool)
        return Batch(self.input_ids, real, self.masked_positions, self.labels, self.samples)

    def dense_labels(self) -> Tensor:
        """int64 ``[B, N]`` labels as transformers wants them, -100 where there is no target."""
        labels = torch.full_like(self.input_ids, -100)
        return labels.scatter_(1, self.masked_positions, self.labels)


def make_batch(model: ModelConfig, tokens: int, length: int, device: torch.device) -> StepBatch:
    """Rows of random tokens with 15 % of them behind one id that stands for [MASK]."""
    generator = torch.Generator().manual_seed(7)
    rows, count = tokens // length, round(MASKED_SHARE * length)
    original = torch.randint(5, model.vocab_size - 200, (rows, length), generator=generator)
    order = torch.rand(rows, length, generator=generator).argsort(1)
    picked = order[:, :count].sort(1).values
    return StepBatch(
        input_ids=original.scatter(1, picked, model.vocab_size - 100).to(device),
        masked_positions=picked.to(device),
        labels=original.gather(1, picked).to(device),
        samples=torch.arange(rows, device=device),
    )

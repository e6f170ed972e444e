"""The batch shared by all sides of a comparison: same tokens, same masks, no padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.model import ModelInputs

MASKED_SHARE = 0.15


@dataclass(frozen=True)
class StepBatch:
    """Rows without padding, each with the same number of targets.

    Attributes:
        input_ids: int64 ``[B, N]`` after masking.
        masked_positions: int64 ``[B, M]``, ascending positions in the row.
        labels: int64 ``[B, M]``, the original tokens at these positions.
        samples: int64 ``[B]``, row numbers, which key the dropout of this project's model.
    """

    input_ids: Tensor
    masked_positions: Tensor
    labels: Tensor
    samples: Tensor

    def split(self, parts: int) -> list[StepBatch]:
        """Split the rows into ``parts`` micro batches of equal size."""
        columns = (self.input_ids, self.masked_positions, self.labels, self.samples)
        return [
            StepBatch(*part)
            for part in zip(*(column.chunk(parts) for column in columns), strict=True)
        ]

    def unpadded(self) -> Batch:
        """The rows as our models take them."""
        inputs = ModelInputs(self.input_ids)
        return Batch(inputs, self.masked_positions, self.labels, self.samples)

    def dense_labels(self) -> Tensor:
        """Return the labels of transformers, int64 ``[B, N]``, -100 at other positions."""
        labels = torch.full_like(self.input_ids, -100)
        return labels.scatter_(1, self.masked_positions, self.labels)


def make_batch(model: ModelConfig, tokens: int, length: int, device: torch.device) -> StepBatch:
    """Return rows of random tokens with 15 % of them replaced by one id for [MASK]."""
    generator = torch.Generator().manual_seed(7)
    rows, count = tokens // length, round(MASKED_SHARE * length)
    original = torch.randint(5, model.vocab_size - 200, (rows, length), generator=generator)
    order = torch.rand(rows, length, generator=generator).argsort(1)
    masked = order[:, :count].sort(1).values
    return StepBatch(
        input_ids=original.scatter(1, masked, model.vocab_size - 100).to(device),
        masked_positions=masked.to(device),
        labels=original.gather(1, masked).to(device),
        samples=torch.arange(rows, device=device),
    )

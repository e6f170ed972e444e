"""Tensors of one micro batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

# Label of a padding position.
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro batch of packed, masked rows; on the CPU until ``to``.

    Every tensor-parallel rank of a data-parallel rank holds the same batch.

    Attributes:
        input_ids: [B, N] int64 tokens after masking; padding at the end of a row.
        attention_mask: [B, N] bool, True = real token.
        masked_positions: [B, M] int64 row positions to predict, ascending, -1 = padding at the
            end. M is a constant of the run.
        labels: [B, M] int64 original tokens at those positions, -100 = padding.
        sample_index: [B] int64 global sample index, -1 = padding row of the last validation batch,
            without labels.
        document_ids: [B, N] int64, non-decreasing along a row, or None where attention crosses
            documents.
        position_ids: [B, N] int64 positions restarting in each document, or None = 0..N-1.
        token_type_ids: [B, N] int64, 0 in the first segment of a pair and at padding, 1 in the
            second; None where rows are not pairs.
        next_sentence_labels: [B] int64, 0 = the second segment follows the first, 1 = it does not,
            -100 = padding row; None where rows are not pairs.
    """

    input_ids: Tensor
    attention_mask: Tensor
    masked_positions: Tensor
    labels: Tensor
    sample_index: Tensor
    document_ids: Tensor | None = None
    position_ids: Tensor | None = None
    token_type_ids: Tensor | None = None
    next_sentence_labels: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on ``device``; ``non_blocking`` needs pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; torch's ``DataLoader`` calls this method."""
        return self._map(lambda tensor: tensor.pin_memory())

    def clone(self) -> Batch:
        """Return a copy in this process's own memory."""
        return self._map(Tensor.clone)

    def record_stream(self, stream: torch.Stream) -> None:
        """Prevent reuse of the batch's device memory before ``stream`` is past this point."""
        for item in fields(self):
            if (tensor := getattr(self, item.name)) is not None:
                tensor.record_stream(stream)

    @property
    def num_targets(self) -> int:
        """Number of masked positions to predict; synchronizes with the device."""
        return int((self.masked_positions >= 0).sum())

    def _map(self, transform: Callable[[Tensor], Tensor]) -> Batch:
        tensors = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(self, **{k: transform(v) for k, v in tensors.items() if v is not None})

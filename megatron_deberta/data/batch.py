"""Tensors of one micro batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

# Label of a padding position.
IGNORED_LABEL = -100

_Self = TypeVar("_Self", bound="MicroBatch")


class MicroBatch:
    """Base class of micro batches: dataclasses of tensors, on the CPU until ``to``.

    Every tensor-parallel rank of a data-parallel rank holds the same batch.

    Attributes:
        sample_index: int64 global sample indices, -1 = padding sample without labels.
    """

    __slots__ = ()
    sample_index: Tensor

    @property
    def dropout_keys(self) -> Tensor:
        """[B] int64: number of each row in the run, part of the dropout key."""
        return self.sample_index

    def to(self: _Self, device: torch.device | str, non_blocking: bool = False) -> _Self:
        """Return the batch on ``device``; ``non_blocking`` needs pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self: _Self) -> _Self:
        """Return the batch in page-locked memory; torch's ``DataLoader`` calls this method."""
        return self._map(lambda tensor: tensor.pin_memory())

    def clone(self: _Self) -> _Self:
        """Return a copy in this process's own memory."""
        return self._map(Tensor.clone)

    def record_stream(self, stream: torch.Stream) -> None:
        """Prevent reuse of the batch's device memory before ``stream`` is past this point."""
        for tensor in self._tensors().values():
            tensor.record_stream(stream)

    def _tensors(self) -> dict[str, Tensor]:
        items = ((item.name, getattr(self, item.name)) for item in fields(cast(Any, self)))
        return {name: tensor for name, tensor in items if isinstance(tensor, Tensor)}

    def _map(self: _Self, transform: Callable[[Tensor], Tensor]) -> _Self:
        changed = {name: transform(tensor) for name, tensor in self._tensors().items()}
        return cast(_Self, replace(cast(Any, self), **changed))


@dataclass(frozen=True, slots=True)
class Batch(MicroBatch):
    """One micro batch of packed, masked rows.

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
        is_padded: False: the host has seen that every token is real.
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
    is_padded: bool = field(default=True, kw_only=True)

    @property
    def padding_mask(self) -> Tensor | None:
        """The attention mask, or None if every token is real, so that nothing is masked."""
        return self.attention_mask if self.is_padded else None

    is_causal: ClassVar[bool] = False

    @property
    def num_targets(self) -> int:
        """Number of masked positions to predict; synchronizes with the device."""
        return int((self.masked_positions >= 0).sum())


class CausalBatch(Batch):
    """One micro batch of next-token prediction.

    ``masked_positions`` are the positions whose state predicts the next token, and ``labels`` these
    tokens; nothing is masked.
    """

    __slots__ = ()
    is_causal: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class TaskBatch(MicroBatch):
    """One micro batch of a labelled task.

    Attributes:
        input_ids: [B, N] int64 tokens; N is the length of the longest row.
        attention_mask: [B, N] bool, True = real token.
        token_type_ids: [B, N] int64, 0 in the first segment and at padding, 1 in the second.
        labels: int64 class [B], or fp32 score [B], or int64 first and last token of the answer
            [B, 2], or int64 class of each token [B, N], or int64 right choice [E]. -100 and NaN
            are not scored.
        sample_index: [B] or [E] int64 global sample index, -1 = padding sample.
        row_index: [B] int64 row of the encoded data, -1 = padding row.
        choice_rows: [E, C] int64 rows of this batch that are the choices of each example, -1 =
            padding; None in other tasks than multiple choice.
        row_keys: [B] int64 dropout keys of the rows of choices; None: ``sample_index``.
        packed_index: [P, L] int64; like the following a field of ``RowPacking``; None: not packed.
        packed_firsts: [P, S] int64.
        packed_places: [B] int64.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor
    labels: Tensor
    sample_index: Tensor
    row_index: Tensor
    choice_rows: Tensor | None = None
    row_keys: Tensor | None = None
    packed_index: Tensor | None = None
    packed_firsts: Tensor | None = None
    packed_places: Tensor | None = None

    @property
    def dropout_keys(self) -> Tensor:
        """[B] int64: number of each row in the run, part of the dropout key."""
        return self.sample_index if self.row_keys is None else self.row_keys

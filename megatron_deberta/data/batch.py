"""Tensors of one micro batch, and micro batches as bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from safetensors.torch import load, save
from torch import Tensor

from megatron_deberta.model.inputs import ModelInputs, RowPacking

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

        def record(tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)
            return tensor

        self._map(record)

    def _map(self: _Self, transform: Callable[[Tensor], Tensor]) -> _Self:
        return cast(_Self, _map(self, transform))


def _map(value: Any, transform: Callable[[Tensor], Tensor]) -> Any:
    """Transform all tensors of a tensor, of a dataclass or of a named tuple; keep other values."""
    if isinstance(value, Tensor):
        return transform(value)
    if isinstance(value, tuple):
        return type(value)(*(_map(item, transform) for item in value))
    if is_dataclass(value) and not isinstance(value, type):
        items = ((item.name, getattr(value, item.name)) for item in fields(value))
        return type(value)(**{name: _map(item, transform) for name, item in items})
    return value


class DecoderRows(NamedTuple):
    """The rows of a batch, masked anew for a decoder beside the encoder.

    Attributes:
        input_ids: [B, N] int64 tokens after masking.
        masked_positions: [B, M] int64 row positions to predict, ascending, -1 = padding at the
            end; another M than the encoder's.
        labels: [B, M] int64 original tokens there, -100 = padding.
    """

    input_ids: Tensor
    masked_positions: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Batch(MicroBatch):
    """One micro batch of packed rows with tokens to predict, which are masked unless causal.

    Attributes:
        inputs: [B, N] tokens after masking; padding at the end of a row. With ``inputs.causal``
            nothing is masked.
        masked_positions: [B, M] int64 row positions to predict, ascending, -1 = padding at the
            end. M is a constant of the run. In causal rows, the positions whose state predicts the
            next token.
        labels: [B, M] int64 tokens to predict: the original ones at those positions, or in causal
            rows the next ones; -100 = padding.
        sample_index: [B] int64 global sample index, -1 = padding row of the last validation batch,
            without labels.
        next_sentence_labels: [B] int64, 0 = the second segment follows the first, 1 = it does not,
            -100 = padding row; None where rows are not pairs.
        decoder: the same rows for a decoder; None: the objective has none.
    """

    inputs: ModelInputs
    masked_positions: Tensor
    labels: Tensor
    sample_index: Tensor
    next_sentence_labels: Tensor | None = None
    decoder: DecoderRows | None = None

    @property
    def num_targets(self) -> int:
        """Number of positions to predict; synchronizes with the device."""
        return int((self.masked_positions >= 0).sum())


@dataclass(frozen=True, slots=True)
class TaskBatch(MicroBatch):
    """One micro batch of a labelled task.

    Attributes:
        inputs: [B, N] tokens; N is the length of the longest row.
        labels: int64 class [B], or 1 or 0 for each label [B, L], or fp32 score [B], or int64 first
            and last token of the answer [B, 2], or int64 class of each token [B, N], or int64 right
            choice [E], or fp32 relevance [B]. -100 and NaN are not scored.
        sample_index: [B] or [E] int64 global sample index, -1 = padding sample.
        row_index: [B] int64 row of the encoded data, -1 = padding row.
        choice_rows: [E, C] int64 rows of this batch that are the choices of each example, or the
            passages of each query, -1 = padding; None in other tasks.
        row_keys: [B] int64 dropout keys of these rows; None: ``sample_index``.
        packing: which rows stand side by side; None: none.
    """

    inputs: ModelInputs
    labels: Tensor
    sample_index: Tensor
    row_index: Tensor
    choice_rows: Tensor | None = None
    row_keys: Tensor | None = None
    packing: RowPacking | None = None

    @property
    def dropout_keys(self) -> Tensor:
        """[B] int64: number of each row in the run, part of the dropout key."""
        return self.sample_index if self.row_keys is None else self.row_keys


_TYPES: dict[str, Any] = {
    kind.__name__: kind for kind in (Batch, DecoderRows, TaskBatch, ModelInputs, RowPacking)
}


def batches_to_bytes(batches: Sequence[MicroBatch], outputs: Sequence[Tensor | None]) -> bytes:
    """Serialise micro batches and their outputs, as safetensors.

    Args:
        batches: micro batches, on any device.
        outputs: a tensor of any shape, or None, for each micro batch.
    """
    tensors: dict[str, Tensor] = {}
    described = _describe([list(batches), list(outputs)], "", tensors)
    content: bytes = save(tensors, {"batches": json.dumps(described)})
    return content


def batches_from_bytes(content: bytes) -> tuple[list[MicroBatch], list[Tensor | None]]:
    """Return what ``batches_to_bytes`` was given, on the CPU."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    batches, outputs = _restore(json.loads(header["__metadata__"]["batches"]), load(content))
    return batches, outputs


def _describe(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON values; its tensors are added to ``tensors`` by their place in it."""
    if isinstance(value, Tensor):
        # A copy: the format refuses tensors that share memory.
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {"tensor": name}
    if isinstance(value, list):
        return [_describe(item, f"{name}.{number}", tensors) for number, item in enumerate(value)]
    names: Sequence[str] = getattr(value, "_fields", ())
    if is_dataclass(value):
        names = [item.name for item in fields(value)]
    if not names:
        return value
    parts = {part: _describe(getattr(value, part), f"{name}.{part}", tensors) for part in names}
    return {"type": type(value).__name__, "fields": parts}


def _restore(described: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value that ``_describe`` was given."""
    if isinstance(described, list):
        return [_restore(item, tensors) for item in described]
    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        return tensors[described["tensor"]]
    parts = {name: _restore(item, tensors) for name, item in described["fields"].items()}
    return _TYPES[described["type"]](**parts)

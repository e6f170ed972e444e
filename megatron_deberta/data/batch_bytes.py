"""Micro batches as bytes, to send them to another rank."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from megatron_deberta.data.batch import Batch, MicroBatch, TaskBatch
from megatron_deberta.model.inputs import ModelInputs, RowPacking

_TYPES: list[Any] = [Batch, TaskBatch, ModelInputs, RowPacking]


def batches_to_bytes(batches: Sequence[MicroBatch], outputs: Sequence[Tensor | None]) -> bytes:
    """Return micro batches, and a tensor or None for each, as bytes."""
    buffer = io.BytesIO()
    # Copies: a tensor that is part of another one would be saved as a whole.
    copies = [None if output is None else output.detach().cpu().clone() for output in outputs]
    torch.save(([batch.to("cpu").clone() for batch in batches], copies), buffer)
    return buffer.getvalue()


def batches_from_bytes(content: bytes) -> tuple[list[MicroBatch], list[Tensor | None]]:
    """Return what ``batches_to_bytes`` was given, on the CPU."""
    with torch.serialization.safe_globals(_TYPES):
        found = torch.load(io.BytesIO(content), weights_only=True)
    return cast("tuple[list[MicroBatch], list[Tensor | None]]", found)

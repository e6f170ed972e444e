"""Micro batches come back from bytes with their type, values and absent fields."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch

from megatron_deberta.data.batch import (
    Batch,
    DecoderRows,
    TaskBatch,
    batches_from_bytes,
    batches_to_bytes,
)
from megatron_deberta.model.inputs import ModelInputs, RowPacking


def described(value: Any) -> Any:
    """Return a batch with lists in place of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.nan_to_num(7).tolist()
    if isinstance(value, tuple):
        return type(value), [described(item) for item in value]
    if is_dataclass(value):
        items = ((item.name, described(getattr(value, item.name))) for item in fields(value))
        return type(value), dict(items)
    return value


def test_batches_come_back() -> None:
    ids = torch.arange(12).view(2, 6)
    mask = ids > 3
    rows = [
        Batch(ModelInputs(ids), ids[:, :2], ids[:, 1:3], ids[:, 0]),
        Batch(ModelInputs(ids), ids, ids, ids[0], decoder=DecoderRows(ids, ids[:, :2], ids)),
        Batch(ModelInputs(ids.t(), mask.t(), causal=True), ids.t(), ids.t(), ids[0]),
        TaskBatch(
            ModelInputs(ids, mask, token_type_ids=ids),
            torch.tensor([0.5, float("nan")]),
            ids[:, 0],
            ids[:, 0],
            packing=RowPacking(ids, ids, ids[0]),
        ),
    ]
    outputs = [torch.randn(3, 2, dtype=torch.bfloat16), None, None, None]
    found, others = batches_from_bytes(batches_to_bytes(rows, outputs))
    for expected, actual in zip(rows, found, strict=True):
        assert described(actual) == described(expected)
    assert others[0] is not None
    assert torch.equal(others[0], outputs[0])
    assert others[1:] == [None, None, None]

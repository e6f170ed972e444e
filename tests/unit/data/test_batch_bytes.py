"""Micro batches come back from bytes with their type, values and absent fields."""

from __future__ import annotations

import torch

from megatron_deberta.data.batch import Batch, CausalBatch, TaskBatch
from megatron_deberta.data.batch_bytes import batches_from_bytes, batches_to_bytes


def test_batches_come_back() -> None:
    ids = torch.arange(12).view(2, 6)
    mask = ids > 3
    rows = [
        Batch(ids, mask, ids[:, :2], ids[:, 1:3], ids[:, 0], is_padded=False),
        CausalBatch(ids.t(), mask.t(), ids.t(), ids.t(), ids[0], document_ids=ids),
        TaskBatch(ids, mask, ids, torch.tensor([0.5, float("nan")]), ids[:, 0], ids[:, 0]),
    ]
    outputs = [torch.randn(3, 2, dtype=torch.bfloat16), None, None]
    found, others = batches_from_bytes(batches_to_bytes(rows, outputs))
    for expected, actual in zip(rows, found, strict=True):
        assert type(actual) is type(expected)
        assert actual._tensors().keys() == expected._tensors().keys()
        for name, tensor in expected._tensors().items():
            assert torch.equal(actual._tensors()[name].nan_to_num(7), tensor.nan_to_num(7)), name
    assert [row.is_padded for row in found[:2]] == [False, True]
    assert others[0] is not None
    assert torch.equal(others[0], outputs[0])
    assert others[1:] == [None, None]

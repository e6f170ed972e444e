"""Micro batches as bytes, to send them to another rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from megatron_deberta.data.batch import Batch, MicroBatch, TaskBatch
from megatron_deberta.model.inputs import ModelInputs, RowPacking

_TYPES: dict[str, Any] = {
    kind.__name__: kind for kind in (Batch, TaskBatch, ModelInputs, RowPacking)
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

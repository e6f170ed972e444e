"""Micro batches as bytes, to send them to another rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

from safetensors.torch import load, save
from torch import Tensor

from megatron_deberta.data.batch import Batch, CausalBatch, MicroBatch, TaskBatch

_TYPES: dict[str, type[MicroBatch]] = {
    kind.__name__: kind for kind in (Batch, CausalBatch, TaskBatch)
}
_OUTPUT = "output"


def batches_to_bytes(batches: Sequence[MicroBatch], outputs: Sequence[Tensor | None]) -> bytes:
    """Return micro batches, and a tensor or None for each, as bytes."""
    tensors: dict[str, Tensor] = {}
    kinds: list[tuple[str, dict[str, Any]]] = []
    for number, (batch, output) in enumerate(zip(batches, outputs, strict=True)):
        values = {item.name: getattr(batch, item.name) for item in fields(cast(Any, batch))}
        found = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        kinds.append((type(batch).__name__, {k: v for k, v in values.items() if k not in found}))
        if output is not None:
            found[_OUTPUT] = output
        for name, value in found.items():
            # A copy: the format refuses tensors that share memory.
            tensors[f"{number}.{name}"] = value.detach().cpu().clone().contiguous()
    content: bytes = save(tensors, {"batches": json.dumps(kinds)})
    return content


def batches_from_bytes(content: bytes) -> tuple[list[MicroBatch], list[Tensor | None]]:
    """Return what ``batches_to_bytes`` was given, on the CPU."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tensors = load(content)
    batches: list[MicroBatch] = []
    outputs: list[Tensor | None] = []
    for number, (kind, values) in enumerate(json.loads(header["__metadata__"]["batches"])):
        start = f"{number}."
        found = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
        outputs.append(found.pop(_OUTPUT, None))
        batches.append(cast(Any, _TYPES[kind])(**found, **values))
    return batches, outputs

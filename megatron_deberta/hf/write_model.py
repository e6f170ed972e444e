"""Writes weights and ``config.json`` as transformers reads them.

Owns sharding of the files and number formats. Refuses tokenizers, modeling code and publication
under a final name (``hf/export.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import CheckpointError
from megatron_deberta.hf.config import SpecialIds, to_hf_config
from megatron_deberta.hf.names import HFTensor, ModelType, hf_tensors

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MAX_SHARD_BYTES = 4 << 30
"""Largest weight file, which is also the most memory that writing takes."""


def write_hf_model(
    directory: Path,
    config: ModelConfig,
    model_type: ModelType,
    read: Callable[[str], Tensor],
    ids: SpecialIds,
    dtype: str = "fp32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``config.json`` and the safetensors files into an existing directory.

    Never more than one file's tensors are in memory.

    Args:
        directory: where to.
        config: the architecture.
        model_type: as ``config.choose_model_type`` says.
        read: gives the logical fp32 tensor of a canonical name, unpadded and unsplit.
        ids: special tokens of the tokenizer.
        dtype: fp32, fp16 or bf16.
        max_shard_bytes: size above which another file is begun.

    Raises:
        CheckpointError: a weight does not fit the format's range.
    """
    entries = hf_tensors(config, model_type, ids.pad)
    size = DTYPES[dtype].itemsize
    shards = _split(entries, size, max_shard_bytes)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        tensors = {entry.name: _convert(entry, read, dtype) for entry in shard}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
    if len(shards) > 1:
        total = sum(math.prod(entry.shape) for entry in entries) * size
        content = {"metadata": {"total_size": total}, "weight_map": index}
        _write_json(directory / "model.safetensors.index.json", content)
    torch_name = str(DTYPES[dtype]).removeprefix("torch.")
    _write_json(directory / "config.json", to_hf_config(config, model_type, ids, torch_name))


def _convert(entry: HFTensor, read: Callable[[str], Tensor], dtype: str) -> Tensor:
    packed = entry.pack([read(part) for part in entry.parts])
    if tuple(packed.shape) != entry.shape:
        raise CheckpointError(
            f"{entry.name}: shape {tuple(packed.shape)} in the checkpoint is not {entry.shape} of "
            "its config; the checkpoint is of another model"
        )
    converted = packed.to(DTYPES[dtype]).contiguous()
    if dtype == "fp16" and not torch.isfinite(converted).all():
        largest = packed.abs().max().item()
        raise CheckpointError(
            f"{entry.name} holds {largest:g}, beyond fp16's range; use --dtype bf16 or fp32"
        )
    return converted


def _split(entries: list[HFTensor], itemsize: int, max_bytes: int) -> list[list[HFTensor]]:
    shards: list[list[HFTensor]] = [[]]
    filled = 0
    for entry in entries:
        size = math.prod(entry.shape) * itemsize
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += size
    return shards


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

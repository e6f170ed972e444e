"""Writing of safetensors files, hashed from the tensors while they are written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

_DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write and flush a new safetensors file, with the bytes of ``safetensors.torch.save_file``.

    A file that is read back for its hash would verify although it was corrupted on the way to the
    disk; this hash is of the tensors.

    Args:
        path: the file; must not exist.
        tensors: by name; any shape and device, dtypes of ``_DTYPES``.

    Returns:
        Size of the file and its hexadecimal SHA-256.

    Raises:
        OSError: the disk is full or the folder not writable.
    """
    # Largest dtypes first, so that all tensors are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("xb") as stream:
        for piece in (len(content).to_bytes(8, "little"), content):
            digest.update(piece)
            stream.write(piece)
        for name in names:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().data
            digest.update(data)
            stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return 8 + len(content) + offset, digest.hexdigest()

"""Whether the Triton kernels for element-wise operations can run on a device."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_FEATURES = 8192
"""Largest LayerNorm of one program."""


def can_fuse(device: torch.device) -> bool:
    """Return whether fused functions can be compiled for a device: a GPU that Triton supports."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def runs_kernels(x: Tensor) -> bool:
    """Return whether the kernels support the device and dtype of a tensor.

    Args:
        x: any shape.
    """
    return x.dtype in KERNEL_DTYPES and _can_fuse(x.device)


@cache
def _can_fuse(device: torch.device) -> bool:
    """Return `can_fuse`, looked up once."""
    return can_fuse(device)

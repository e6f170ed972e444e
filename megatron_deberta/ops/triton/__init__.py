"""Fused Triton kernels, for Ampere and newer GPUs, and where they can run."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

TRITON_INSTALLED = find_spec("triton") is not None
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_FEATURES = 8192
"""Largest LayerNorm of one program."""
_HEAD_SIZES = (32, 64, 128)


def can_fuse(device: torch.device) -> bool:
    """Return whether fused functions can be compiled for a device: a GPU that Triton supports."""
    if device.type != "cuda" or not TRITON_INSTALLED:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def runs_kernels(x: Tensor) -> bool:
    """Return whether the element-wise kernels support the device and dtype of a tensor.

    Args:
        x: any shape.
    """
    return x.dtype in KERNEL_DTYPES and _can_fuse(x.device)


@cache
def _can_fuse(device: torch.device) -> bool:
    """Return `can_fuse`, looked up once."""
    return can_fuse(device)


def why_not_fused(q: Tensor) -> str | None:
    """Return why the attention kernels cannot run on these queries, or None if they can.

    Args:
        q: queries ``[batch, heads, q_len, head_dim]``.
    """
    if not TRITON_INSTALLED:
        return "Triton is not installed"
    if q.dtype not in KERNEL_DTYPES:
        return f"the kernels do not support {q.dtype}"
    if q.shape[-1] not in _HEAD_SIZES:
        return f"heads have {q.shape[-1]} features and the kernels support only 32, 64 and 128"
    if q.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(q.device)
        if major < 8:
            return f"this GPU is sm_{major}{minor} and the kernels need sm_80 or newer"
        return None
    if q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        if q.dtype == torch.bfloat16:
            return "the arithmetic of Triton's interpreter is wrong in bfloat16"
        return None
    return f"the kernels run on CUDA devices (sm_80 or newer), not on {q.device.type}"

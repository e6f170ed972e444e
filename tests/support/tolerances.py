"""Every tolerance of the test suite. Changing one needs a line in CHANGELOG.md."""

from __future__ import annotations

import torch

FP64 = {"rtol": 1e-9, "atol": 1e-11}
"""Same mathematics in another order, float64."""
FP32_MODULE = {"rtol": 1e-5, "atol": 1e-5}
"""One module against another implementation, float32."""
FP32_MODEL = {"rtol": 1e-4, "atol": 1e-4}
"""A whole model against another implementation, float32."""
OPERATOR = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1.5e-3,
    torch.bfloat16: 6e-3,
}
"""The attention operator and its gradients against float64: relative Frobenius norm."""
LAYOUT_LOSS = 1e-5
"""Relative difference of any loss of the same run on two layouts, fp32, 20 steps."""
LAYOUT_GRADIENT = 1e-4
"""Relative Frobenius difference of any parameter's gradient on two layouts, fp32."""

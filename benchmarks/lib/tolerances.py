"""Tolerances of benchmarks and tests for the attention operator and whole models."""

from __future__ import annotations

import torch

# A whole model against another implementation, float32.
FP32_MODEL = {"rtol": 1e-4, "atol": 1e-4}
# The attention operator and its gradients against float64: relative Frobenius norm.
OPERATOR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 6e-3}

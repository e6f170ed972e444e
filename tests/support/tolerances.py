"""All tolerances of the test suite. Changing one needs a line in CHANGELOG.md."""

from __future__ import annotations

from benchmarks.lib.tolerances import FP32_MODEL, OPERATOR

__all__ = [
    "FP32_MODEL",
    "FP32_MODULE",
    "FP64",
    "LAYOUT_GRADIENT",
    "LAYOUT_LOSS",
    "OPERATOR",
]
FP64 = {"rtol": 1e-9, "atol": 1e-11}
"""Same computation in another order, float64."""
FP32_MODULE = {"rtol": 1e-5, "atol": 1e-5}
"""A module compared with another implementation, float32."""
LAYOUT_LOSS = 1e-5
"""Relative difference of any loss of the same run on two layouts, fp32, 20 steps."""
LAYOUT_GRADIENT = 1e-4
"""Relative Frobenius difference of any parameter's gradient on two layouts, fp32."""

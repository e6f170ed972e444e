"""Every tolerance of the test suite. Changing one needs a line in CHANGELOG.md."""

from __future__ import annotations

FP64 = {"rtol": 1e-9, "atol": 1e-11}
"""Same mathematics in another order, float64."""
FP32_MODULE = {"rtol": 1e-5, "atol": 1e-5}
"""One module against another implementation, float32."""
FP32_MODEL = {"rtol": 1e-4, "atol": 1e-4}
"""A whole model against another implementation, float32."""

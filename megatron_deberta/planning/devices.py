"""GPUs: figures of their data sheets, and the assumed share of the matrix rate in training."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from megatron_deberta.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One kind of GPU."""

    name: str
    """As in cluster profiles."""
    memory_gb: float
    half_tflops: float
    """Dense matrix rate in fp16 and, where supported, bf16."""
    single_tflops: float
    """Matrix rate in fp32 (not TF32)."""
    memory_gb_per_second: float
    link_gb_per_second: float
    """NVLink bandwidth of one device, one way."""
    achieved: float
    """Share of the matrix rate that forward and backward are assumed to reach."""
    achieved_source: str
    attention: Literal["triton", "chunked"]
    """Attention backend: ``triton`` from sm_80 on, ``chunked`` before."""
    attention_bytes: float = 0.0
    """Memory traffic per attention score in forward and backward, in 16 bits, with both position
    terms; it takes time besides the matrix products. 0: none, or included in ``achieved``."""

    def flops_per_second(self, dtype: str) -> float:
        """Return the data sheet's matrix rate for ``precision.dtype``."""
        return 1e12 * (self.single_tflops if dtype == "fp32" else self.half_tflops)


CHUNKED_BYTES = 248
"""Memory traffic per attention score of the ``chunked`` backend, see `Device.attention_bytes`.

Counted: 25 GB per layer of the 1.5B model and 8,192 tokens in rows of 512."""
MEASURED = "--achieved"
"""Source of a share that was measured of whole steps."""

_HOPPER_SOURCE = "assumed; no measurement of this project yet"

DEVICES: tuple[Device, ...] = (
    Device(
        name="V100-32GB", memory_gb=32, half_tflops=125, single_tflops=15.7,
        memory_gb_per_second=900, link_gb_per_second=150, achieved=0.30,
        achieved_source="39 TFLOP/s on one V100 (Shoeybi et al. 2019, arXiv:1909.08053, section 1)",
        attention="chunked", attention_bytes=CHUNKED_BYTES,
    ),
    Device(
        name="A100-80GB", memory_gb=80, half_tflops=312, single_tflops=19.5,
        memory_gb_per_second=2039, link_gb_per_second=300, achieved=0.44,
        achieved_source="137 TFLOP/s at 1.7B (Narayanan et al. 2021, arXiv:2104.04473, Table 1)",
        attention="triton",
    ),
    Device(
        name="H100-80GB", memory_gb=80, half_tflops=989, single_tflops=67,
        memory_gb_per_second=3350, link_gb_per_second=450, achieved=0.40,
        achieved_source=_HOPPER_SOURCE, attention="triton",
    ),
    Device(
        name="H200-141GB", memory_gb=141, half_tflops=989, single_tflops=67,
        memory_gb_per_second=4800, link_gb_per_second=450, achieved=0.40,
        achieved_source=_HOPPER_SOURCE, attention="triton",
    ),
)  # fmt: skip
"""Figures of NVIDIA's data sheets of the SXM boards, without sparsity."""


def find_device(name: str) -> Device:
    """Return the device of a name, in any case, with or without the part after the dash.

    Raises:
        ConfigError: there is none.
    """
    known = {device.name.lower(): device for device in DEVICES}
    short = {key.split("-")[0]: device for key, device in known.items()}
    found = known.get(name.lower()) or short.get(name.lower())
    if found is None:
        close = difflib.get_close_matches(name.lower(), [*known, *short], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        listed = ", ".join(device.name for device in DEVICES)
        raise ConfigError(f"device={name} must be one of {listed}{hint}")
    return found

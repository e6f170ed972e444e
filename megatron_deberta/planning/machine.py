"""The machine of a plan: devices with figures of their data sheets, nodes, links, assumed rates."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Literal

from megatron_deberta.cluster.profile import ClusterProfile
from megatron_deberta.errors import ConfigError

RESERVED_MEMORY = 0.08
"""Share of device memory for the driver, the communication library and fragmentation."""
LINK_EFFICIENCY = 0.8
"""Assumed share of a link's bandwidth that a large collective reaches."""
CALL_SECONDS = 20e-6
"""Assumed latency of a collective."""
FAILURE_DAYS = 60.0
"""Assumed mean days between failures of one node: every few days one of 16."""


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
        return 1e12 * (self.single_tflops if dtype in ("auto", "fp32") else self.half_tflops)


CHUNKED_BYTES = 248
"""Memory traffic per attention score of the ``chunked`` backend, see `Device.attention_bytes`.

Counted: 25 GB per layer of the 1.5B model and 8,192 tokens in rows of 512."""
EFFICIENT_BYTES = 105
"""Memory traffic per attention score of the ``efficient`` backend.

Counted: 5.3 GB per layer of the 1.5B model and 4,096 tokens in rows of 512, with dropout."""
MEASURED = "--mfu"
"""Source of a share that was measured of whole steps."""

_HOPPER_SOURCE = (
    "assumed; an H100 reached 33% while it was busy, before its slowest kernel was improved"
)

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
        # Another memory is another device: A100-40GB is not a misspelt A100-80GB.
        memory = re.sub(r"\D", "", name.partition("-")[2])
        alike = [key for key in known if re.sub(r"\D", "", key.partition("-")[2]) == memory]
        names = alike if memory else list(short)
        close = difflib.get_close_matches(name.lower(), names, n=1)
        hint = f"; did you mean {(known | short)[close[0]].name}?" if close else ""
        listed = ", ".join(device.name for device in DEVICES)
        raise ConfigError(f"device={name} must be one of {listed}{hint}")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Devices and links of a cluster."""

    device: Device
    ranks_per_node: int
    network_gb_per_second: float
    """Bandwidth of all of a node's adapters, one way."""
    dtypes: tuple[str, ...]
    """Values of ``precision.dtype`` that the devices support."""
    host_gib: int = 0
    """Host memory per node; 0: unknown."""

    @property
    def capacity_bytes(self) -> float:
        """Device memory available to tensors."""
        return (1 - RESERVED_MEMORY) * self.device.memory_gb * 1e9


def machine_of(profile: ClusterProfile, device: str = "", achieved: float = 0.0) -> Machine:
    """Return the machine of a cluster profile.

    Args:
        profile: the profile.
        device: name of the device; empty: the profile's.
        achieved: share of the matrix rate that training reaches; 0: the device's.

    Raises:
        ConfigError: device or network is unknown, or the share is not between 0 and 1.
    """
    name = device or profile.device
    if not name:
        raise ConfigError("the cluster profile has no device; add it, or give --device NAME")
    if not profile.network_gbit_per_second:
        raise ConfigError(
            "the cluster profile has no network_gbit_per_second; add the bandwidth of a node"
        )
    if not 0 <= achieved <= 1:
        raise ConfigError(f"--mfu {achieved} must be between 0 and 1, such as 0.4")
    found = find_device(name)
    if achieved:
        # A measured share is one of whole steps.
        found = replace(found, achieved=achieved, achieved_source=MEASURED, attention_bytes=0.0)
    return Machine(
        device=found,
        ranks_per_node=profile.ranks_per_node,
        network_gb_per_second=profile.network_gbit_per_second / 8,
        dtypes=profile.dtypes,
        host_gib=profile.memory_gib_per_node,
    )

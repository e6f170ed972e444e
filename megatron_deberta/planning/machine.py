"""The machine of a plan: its devices, nodes and links, from a cluster profile and options."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_deberta.cluster.profile import ClusterProfile
from megatron_deberta.errors import ConfigError
from megatron_deberta.planning.devices import MEASURED, Device, find_device

RESERVED_MEMORY = 0.08
"""Share of device memory for the driver, the communication library and fragmentation."""
LINK_EFFICIENCY = 0.8
"""Assumed share of a link's bandwidth that a large collective reaches."""
CALL_SECONDS = 20e-6
"""Assumed latency of a collective."""


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
        raise ConfigError(f"--achieved {achieved} must be between 0 and 1, such as 0.4")
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

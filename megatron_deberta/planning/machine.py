"""The machine a run is planned for: its device, its nodes, its links.

Owns how a cluster profile and options on a command line become numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_deberta.cluster.profile import ClusterProfile
from megatron_deberta.errors import ConfigError
from megatron_deberta.planning.devices import Device, find_device

RESERVED_MEMORY = 0.08
"""Share of a device left to the driver, the communication library and fragmentation."""
LINK_EFFICIENCY = 0.8
"""Share of a link's rate that a large collective is assumed to reach."""
CALL_SECONDS = 20e-6
"""What a collective is assumed to take however little it carries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Numbers of a cluster."""

    device: Device
    """One rank's."""
    ranks_per_node: int
    """Ranks behind one node's NVLink."""
    network_gb_per_second: float
    """All of a node's adapters, one way; units of 1e9 bytes."""
    dtypes: tuple[str, ...]
    """``precision.dtype`` that the devices compute."""

    @property
    def capacity_bytes(self) -> float:
        """Device memory that tensors may take."""
        return (1 - RESERVED_MEMORY) * self.device.memory_gb * 1e9


def machine_of(profile: ClusterProfile, device: str = "", achieved: float = 0.0) -> Machine:
    """The machine of a cluster profile.

    Args:
        profile: of ``cluster/profiles/``.
        device: in place of the profile's; empty: the profile's.
        achieved: share of the matrix rate in place of the device's; 0: the device's.

    Raises:
        ConfigError: no device or network is known, or a share is not between 0 and 1.
    """
    name = device or profile.device
    if not name:
        raise ConfigError(
            "the cluster profile names no device; add device= to it, or plan with --device NAME"
        )
    if not profile.network_gbit_per_second:
        raise ConfigError(
            "the cluster profile has no network_gbit_per_second; add what a node's adapters carry"
        )
    if not 0 <= achieved <= 1:
        raise ConfigError(f"--achieved {achieved}: a share of the matrix rate, such as 0.4")
    found = find_device(name)
    if achieved:
        found = replace(found, achieved=achieved, achieved_source="--achieved")
    return Machine(
        device=found,
        ranks_per_node=profile.ranks_per_node,
        network_gb_per_second=profile.network_gbit_per_second / 8,
        dtypes=profile.dtypes,
    )

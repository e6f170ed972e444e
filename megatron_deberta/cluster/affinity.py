"""Assignment of a node's cores to its ranks.

GPUs and cores are assumed to be numbered in the same order over the sockets, as on DGX machines, so
that ranks in order are near their GPUs.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import suppress
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


def numa_nodes(system: Path = SYSTEM) -> list[tuple[int, set[int]]]:
    """Return the number and the cores of each NUMA node, in order; empty without NUMA."""
    found = []
    for path in (system / "node").glob("node[0-9]*/cpulist"):
        cpus: set[int] = set()
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            if first:
                cpus |= set(range(int(first), int(last or first) + 1))
        found.append((int(path.parent.name.removeprefix("node")), cpus))
    return sorted(found)


def divide(allowed: Set[int], ranks: int, system: Path = SYSTEM) -> list[set[int]]:
    """Divide cores among ranks in equal parts, in the order of sockets.

    Args:
        allowed: cores that the job may use on this node, including hyperthreads.
        ranks: ranks of the node.
        system: folder in which the kernel describes the machine.

    Returns:
        The cores of each rank; all cores for every rank if there are fewer cores than ranks.
    """
    if len(allowed) < ranks:
        return [set(allowed) for _ in range(ranks)]
    numa = {cpu: node for node, cpus in numa_nodes(system) for cpu in cpus}

    def place(cpu: int) -> tuple[int, int, int]:
        # Makes hyperthreads of a core neighbours.
        core = cpu
        with suppress(OSError, ValueError):
            core = int((system / "cpu" / f"cpu{cpu}" / "topology" / "core_id").read_text())
        return numa.get(cpu, 0), core, cpu

    ordered = sorted(allowed, key=place)
    share = len(ordered) // ranks
    return [set(ordered[rank * share : (rank + 1) * share]) for rank in range(ranks)]

"""Which cores each rank of a node runs on.

Owns the division. Refuses to look for GPUs: on the machines this is for, GPUs and cores are
numbered through the sockets alike, so ranks in order are near their GPUs.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import suppress
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


def numa_nodes(system: Path = SYSTEM) -> list[tuple[int, set[int]]]:
    """NUMA nodes of this machine, in order, and their cores; none where the kernel has none."""
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
    """Divide cores among ranks: no rank over two sockets if it can be helped, no core for two.

    Args:
        allowed: cores that this node's job may use, hyperthreads included.
        ranks: of the node.
        system: where the kernel describes the machine.

    Returns:
        As many cores for each rank; all of them for every rank where there are too few.
    """
    if len(allowed) < ranks:
        return [set(allowed) for _ in range(ranks)]
    numa = {cpu: node for node, cpus in numa_nodes(system) for cpu in cpus}

    def place(cpu: int) -> tuple[int, int, int]:
        # Hyperthreads of a core are neighbours in this order.
        core = cpu
        with suppress(OSError, ValueError):
            core = int((system / "cpu" / f"cpu{cpu}" / "topology" / "core_id").read_text())
        return numa.get(cpu, 0), core, cpu

    ordered = sorted(allowed, key=place)
    share = len(ordered) // ranks
    return [set(ordered[rank * share : (rank + 1) * share]) for rank in range(ranks)]

"""Nodes of a job, and exchange of bytes between ranks over a CPU group."""

from __future__ import annotations

import datetime
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_deberta.distributed.control import gather_bytes
from megatron_deberta.distributed.topology import ProcessGroups


def node_name() -> str:
    """Return this node's name: SLURM's, else the host name; usable as a folder name."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of all ranks.

    Attributes:
        rank: this rank.
        names: node name by rank.
        group: gloo group of all ranks for data in host memory; None in a single process.
    """

    rank: int
    names: tuple[str, ...]
    group: ProcessGroup | None

    @classmethod
    def connect(cls, groups: ProcessGroups, timeout_minutes: float) -> Nodes:
        """Create the group and gather the names. Collective over all ranks."""
        group = None
        if groups.world_size > 1:
            timeout = datetime.timedelta(minutes=timeout_minutes)
            group = dist.new_group(backend="gloo", timeout=timeout)
        names = gather_bytes(node_name().encode(), group)
        return cls(groups.rank, tuple(name.decode() for name in names), group)

    @property
    def own_ranks(self) -> list[int]:
        """Ranks on this rank's node."""
        return self._ranks_on(self.names[self.rank])

    @property
    def target(self) -> int | None:
        """Rank on the next node that keeps this rank's replica; None: there is one node."""
        return self._target_of(self.rank)

    @property
    def sources(self) -> list[int]:
        """Ranks whose replicas this rank keeps."""
        ranks = range(len(self.names))
        return [rank for rank in ranks if self._target_of(rank) == self.rank]

    def gather(self, content: bytes) -> list[bytes]:
        """Return every rank's content, by rank. Collective over all ranks."""
        return gather_bytes(content, self.group)

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """Return sums over all ranks. Collective over all ranks."""
        total = torch.tensor(numbers, dtype=torch.int64)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return [int(number) for number in total]

    def _ranks_on(self, name: str) -> list[int]:
        return [rank for rank, other in enumerate(self.names) if other == name]

    def _target_of(self, rank: int) -> int | None:
        nodes = list(dict.fromkeys(self.names))
        if len(nodes) == 1:
            return None
        name = self.names[rank]
        neighbours = self._ranks_on(nodes[(nodes.index(name) + 1) % len(nodes)])
        return neighbours[self._ranks_on(name).index(rank) % len(neighbours)]

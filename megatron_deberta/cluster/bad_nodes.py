"""Nodes that this run stays away from for a while, and why.

Owns ``bad_nodes.jsonl`` in the run folder: one line a reason. Refuses to tell SLURM: ``link.py``
does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_deberta.cluster.watchdog.hang import Diagnosis

FILE_NAME = "bad_nodes.jsonl"
ENOUGH_DEATHS = 2
"""One killed rank may be anything's fault; so many on one node are the node's."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One reason against a node."""

    node: str
    reason: str
    time: float
    """Seconds since the epoch."""
    weight: int
    """The node is bad from ``ENOUGH_DEATHS`` on."""


class BadNodes:
    """The record of one run.

    Args:
        run_dir: folder of the run.
        hours: how long a mark counts.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        hours: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self._seconds = 3600 * hours
        self._clock = clock

    def add(self, node: str, reason: str, *, sure: bool) -> None:
        """Mark a node.

        Args:
            node: by the name that SLURM knows.
            reason: in words.
            sure: this alone makes it bad.
        """
        mark = Mark(node, reason, round(self._clock(), 3), ENOUGH_DEATHS if sure else 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as stream:
            stream.write(json.dumps(asdict(mark)) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def record_failure(self, verdict: Diagnosis) -> None:
        """Mark the node of a link's end, if it is clear which.

        A hang of one rank, where all run the same code, is its node's far more often than not, and
        a spare node costs little. A rank that died counts against its node, the second time in
        full; one that ended with an error of its own does not.
        """
        if len(verdict.hosts) != 1:
            return
        if verdict.kind == "hang" or " was killed by signal " in verdict.reason:
            self.add(verdict.hosts[0], verdict.reason, sure=verdict.kind == "hang")

    def current(self) -> dict[str, Mark]:
        """The last mark of each bad node, the node marked last at the end."""
        weights: dict[str, int] = {}
        last: dict[str, Mark] = {}
        for mark in self._marks():
            if mark.time + self._seconds > self._clock():
                weights[mark.node] = weights.get(mark.node, 0) + mark.weight
                last.pop(mark.node, None)
                last[mark.node] = mark
        return {node: mark for node, mark in last.items() if weights[node] >= ENOUGH_DEATHS}

    def _marks(self) -> list[Mark]:
        if not self.path.exists():
            return []
        marks = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                marks.append(Mark(**json.loads(line)))
            except (ValueError, TypeError):
                continue  # Torn by a crash.
        return marks

"""Bad nodes of a run (``bad_nodes.jsonl``), which its next job attempts exclude."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatron_deberta.cluster.event_log import append_event, read_events
from megatron_deberta.cluster.watchdog.hang import Diagnosis
from megatron_deberta.parsing import Seconds

logger = logging.getLogger("job")

FILE_NAME = "bad_nodes.jsonl"
BAD_WEIGHT = 2
"""A node is bad from this sum of weights on: two killed ranks, or one certain failure."""


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """One failure of a node; a line of the file."""

    node: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,255}$")]
    reason: str
    time: Seconds
    """Since the epoch."""
    weight: Literal[1, 2]


class BadNodes:
    """Failures of nodes in one run.

    Args:
        run_dir: folder of the run.
        hours: age after which a failure no longer counts.
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

    def add(self, node: str, reason: str, *, certain: bool) -> None:
        """Record a failure, unless the disk is full.

        Args:
            node: SLURM's name of the node.
            reason: for people.
            certain: this failure alone makes the node bad.
        """
        failure = NodeFailure(node, reason, round(self._clock(), 3), 2 if certain else 1)
        try:
            append_event(self.path, asdict(failure))
        except OSError as error:
            logger.warning("%s: not recorded: %s", self.path, error)

    def record_failure(self, diagnosis: Diagnosis) -> str:
        """Record the failure of a job attempt if it is clear which node caused it.

        All ranks run the same code, so a hang of one is most often its node's fault, and a spare
        node costs little. A rank that a signal killed counts half; one that ended with an error
        does not count.

        Returns:
            The node, if it is bad now; else an empty string.
        """
        if len(diagnosis.hosts) != 1:
            return ""
        node = diagnosis.hosts[0]
        if diagnosis.kind == "hang" or " was killed by signal " in diagnosis.reason:
            self.add(node, diagnosis.reason, certain=diagnosis.kind == "hang")
            return node if node in self.current() else ""
        return ""

    def current(self) -> dict[str, NodeFailure]:
        """Return the last failure of each bad node, oldest first."""
        weights: dict[str, int] = {}
        last: dict[str, NodeFailure] = {}
        for failure in read_events(self.path, NodeFailure):
            if failure.time + self._seconds > self._clock():
                weights[failure.node] = weights.get(failure.node, 0) + failure.weight
                last.pop(failure.node, None)
                last[failure.node] = failure
        return {node: failure for node, failure in last.items() if weights[node] >= BAD_WEIGHT}

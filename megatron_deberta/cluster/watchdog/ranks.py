"""Processes of a node's ranks: what to run, how to start it, and their states."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_deberta.cluster.watchdog.diagnostics import ProcessDiagnostics
from megatron_deberta.cluster.watchdog.hang import RankView
from megatron_deberta.cluster.watchdog.heartbeat import FOLDER_VARIABLE, Beat
from megatron_deberta.cluster.watchdog.log_tail import RankOutput
from megatron_deberta.cluster.watchdog.straggler import Times
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.observe.progress import Section


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """What a node runs."""

    run_dir: str
    attempt: str
    node: int
    """Number of this node in the job."""
    num_nodes: int
    host: str
    """Name by which the node can be excluded."""
    ranks_per_node: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Environment of every rank, without its rank variables."""
    logs: Path
    exit_wait_seconds: float
    config: ClusterConfig
    binds_cores: bool = False
    """Give each rank its own cores, near its GPU."""
    shows_rank_zero: bool = False
    """Copy what rank 0 writes to the supervisor's standard output."""


@dataclass(slots=True)
class RankProcess:
    """A rank's process and its state."""

    number: int
    process: subprocess.Popen[bytes]
    beat: Beat = field(
        default_factory=lambda: Beat(-1, Section.STARTUP, 0, time=time.monotonic_ns(), pid=0)
    )
    """Last heartbeat; before the first, one at the start of the process."""
    code: int | None = None
    ended: float = 0.0
    """Monotonic time in seconds."""
    killed: bool = False
    cause: str = ""
    """As in :class:`RankView`."""
    diagnostics: ProcessDiagnostics = ProcessDiagnostics("", None, "", "")
    output: RankOutput | None = None

    def view(self, plan: NodePlan, resumed: float) -> RankView:
        """Return the rank's state for a report.

        Args:
            plan: of its node.
            resumed: monotonic time at which the node was last resumed; ages count from there.
        """
        now, beat, found = time.monotonic(), self.beat, self.diagnostics
        return RankView(
            rank=self.number,
            node=plan.node,
            host=plan.host,
            section=beat.section,
            step=beat.step,
            position=beat.position,
            age=max(0.0, now - max(beat.time / 1e9, resumed)),
            pid=self.process.pid,
            state=found.state,
            waiting=found.waiting,
            detail=found.detail,
            code=self.code,
            ended=time.time() - now + self.ended if self.ended else 0.0,
            killed=self.killed,
            cause=self.cause,
        )

    def times(self) -> Times:
        """Return steps, and nanoseconds in data, forward and steps, since the start."""
        beat = self.beat
        return beat.steps_timed, beat.data_time, beat.forward_time, beat.step_time


def rank_environment(
    plan: NodePlan, local_rank: int, num_cores: int, folder: Path
) -> dict[str, str]:
    """Return the environment of a rank.

    Args:
        plan: of its node.
        local_rank: number of the rank on the node.
        num_cores: cores that it may use.
        folder: folder of heartbeats.
    """
    variables: dict[str, object] = {
        "RANK": plan.node * plan.ranks_per_node + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": plan.num_nodes * plan.ranks_per_node,
        "LOCAL_WORLD_SIZE": plan.ranks_per_node,
        FOLDER_VARIABLE: folder,
    }
    if plan.binds_cores and "OMP_NUM_THREADS" not in plan.environment:
        # Otherwise a rank would divide its own cores among all ranks again.
        variables["OMP_NUM_THREADS"] = num_cores
    return {**plan.environment, **{key: str(value) for key, value in variables.items()}}

"""Processes of a node's ranks: what to run, how to start it, and their states."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_deberta.cluster.watchdog.diagnostics import ProcessDiagnostics
from megatron_deberta.cluster.watchdog.hang import RankView
from megatron_deberta.cluster.watchdog.heartbeat import FOLDER_VARIABLE, Beat
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.observe.progress import Section
from megatron_deberta.processes import die_with_parent


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """What a node runs."""

    run_dir: str
    attempt: str
    """Name of the job attempt."""
    node: int
    """Number of this node in the job."""
    num_nodes: int
    host: str
    """Name by which the node can be excluded."""
    ranks_per_node: int
    command: tuple[str, ...]
    """Command of every rank."""
    environment: Mapping[str, str]
    """Environment of every rank, without its rank variables."""
    logs: Path
    """Folder of the ranks' output."""
    exit_wait_seconds: float
    """Time that ranks may outlive the first that has ended."""
    config: ClusterConfig
    binds_cores: bool = False
    """Give each rank its own cores, near its GPU."""
    rank_zero_inherits_output: bool = False
    """Rank 0 writes to the supervisor's output instead of to a file."""


@dataclass(slots=True)
class RankProcess:
    """A rank's process and its state."""

    number: int
    process: subprocess.Popen[bytes]
    started: float
    """Monotonic time in seconds."""
    beat: Beat | None = None
    """Last heartbeat."""
    code: int | None = None
    ended: float = 0.0
    """Monotonic time in seconds."""
    killed: bool = False
    diagnostics: ProcessDiagnostics | None = None

    def view(self, plan: NodePlan, resumed: float) -> RankView:
        """Return the rank's state for a report.

        Args:
            plan: of its node.
            resumed: monotonic time at which the node was last resumed; ages count from there.
        """
        now = time.monotonic()
        beat, found = self.beat, self.diagnostics
        since = max(self.started if beat is None else beat.time / 1e9, resumed)
        return RankView(
            rank=self.number,
            node=plan.node,
            host=plan.host,
            section=Section.STARTUP if beat is None else beat.section,
            step=0 if beat is None else beat.step,
            position=-1 if beat is None else beat.position,
            age=max(0.0, now - since),
            pid=self.process.pid,
            state=found.state if found else "",
            waiting=found.waiting if found else None,
            detail=found.detail if found else "",
            code=self.code,
            ended=time.time() - now + self.ended if self.ended else 0.0,
            killed=self.killed,
        )

    def times(self) -> tuple[int, int, int, int]:
        """Return steps, and nanoseconds in data, forward and steps, since the start."""
        beat = self.beat
        if beat is None:
            return 0, 0, 0, 0
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


def popen(
    command: tuple[str, ...], environment: Mapping[str, str], output: int | None
) -> subprocess.Popen[bytes]:
    """Start a rank's process, which dies with this one.

    Args:
        command: command of the rank.
        environment: its environment.
        output: file descriptor of its output; None: that of this process.
    """
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        # Ctrl-C on a terminal reaches the supervisor only.
        start_new_session=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )

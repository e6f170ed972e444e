"""Costs of local checkpoints, and the time that they save at a given failure rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_deberta.checkpoint.saver import copy_bytes, state_bytes
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.model import count_parameters
from megatron_deberta.planning.machine import Machine
from megatron_deberta.planning.memory import local_parameters

COPY_BYTES_PER_SECOND = 20e9
"""Assumed rate of copies from a device to host memory, per rank."""
KEPT_SAVES = 2
"""Saves on a node's disk while one is being written."""
DAY = 86400.0


class LostTime(NamedTuple):
    """Seconds of training lost per failure, without the restart: half of the interval."""

    shared: float
    """With checkpoints in the run folder alone."""
    local: float
    """With local checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSavePlan:
    """Predicted costs of local checkpoints.

    Attributes:
        every: steps between saves.
        part_bytes: bytes of a node's own parts of a save.
        disk_bytes: largest use of a node's disk: parts and replicas of two saves.
        host_bytes: host memory of a node during a save.
        network_bytes: bytes that a node sends per save, for replicas, and at ZeRO stage 3 to
            assemble parameters.
        stall_seconds: time that training waits per save: the copy to the host.
        step_seconds: time of a step without saves.
        failures_per_day: of all nodes together.
        lost: time lost per failure.
    """

    every: int
    part_bytes: float
    disk_bytes: float
    host_bytes: float
    network_bytes: float
    stall_seconds: float
    step_seconds: float
    failures_per_day: float
    lost: LostTime

    @property
    def stall_share(self) -> float:
        """Share of the training time that saves take."""
        return self.stall_seconds / (self.every * self.step_seconds + self.stall_seconds)

    @property
    def saved_seconds_per_day(self) -> float:
        """Time per day that is not lost to failures, less the stalls; may be negative."""
        gained = self.failures_per_day * (self.lost.shared - self.lost.local)
        return gained - self.stall_share * DAY


def plan_local_saves(
    config: RunConfig,
    machine: Machine,
    world_size: int,
    step_seconds: float,
    failure_days: float,
    total_steps: int,
) -> LocalSavePlan | None:
    """Plan the local checkpoints of a run; None: it has none.

    Args:
        config: the run.
        machine: its machine.
        world_size: number of ranks.
        step_seconds: predicted time of a step.
        failure_days: mean days between failures of one node.
        total_steps: steps of the run, all of which a failure loses without ``save_every``.
    """
    checkpoint, tp_size = config.checkpoint, config.parallel.tensor_parallel_size
    if not checkpoint.local_every:
        return None
    nodes = max(1, world_size // machine.ranks_per_node)
    of_parameter = state_bytes(config.optimizer.ema_decay)
    part = of_parameter * count_parameters(config.model) / nodes
    copies = 2 if nodes > 1 else 1
    dp_size = world_size // tp_size
    stage = config.precision.zero_stage
    shard = of_parameter * local_parameters(config.model, tp_size)
    sent = part * (copies - 1) * (2 if stage == 3 else 1)
    stall = shard / dp_size / COPY_BYTES_PER_SECOND
    interval = checkpoint.save_every or total_steps
    return LocalSavePlan(
        every=checkpoint.local_every,
        part_bytes=part,
        disk_bytes=KEPT_SAVES * copies * part,
        host_bytes=copy_bytes(shard, dp_size, stage) * min(world_size, machine.ranks_per_node),
        network_bytes=sent,
        stall_seconds=stall,
        step_seconds=step_seconds,
        failures_per_day=nodes / failure_days,
        lost=LostTime(
            interval * step_seconds / 2, min(interval, checkpoint.local_every) * step_seconds / 2
        ),
    )

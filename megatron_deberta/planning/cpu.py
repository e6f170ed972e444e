"""The plan of a run on this machine's CPU: batch, parameters, work and memory, but no times.

No rate is assumed: it differs several-fold between processors, number formats and thread counts.
``pretrain`` measures it within a few steps and shows the time that is left.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal

import psutil

from megatron_deberta.config.phases import describe_phases, segments
from megatron_deberta.config.rules import BatchArithmetic, batch_arithmetic, validate_for_world
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.model import count_parameters
from megatron_deberta.model.flops import pretraining_flops_per_token
from megatron_deberta.planning.memory import MemoryEstimate, estimate_memory
from megatron_deberta.planning.search import POLICIES
from megatron_deberta.planning.work import micro_batch_rows, micro_batch_tokens, rows_per_sample

LIBRARY_BYTES = 1 << 30
"""Resident code and data of Python, torch and DeepSpeed in one process, rounded up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuPlan:
    """Predicted costs of a run on this machine; memory per rank, by recomputation policy."""

    config: RunConfig
    cores: int
    memory_bytes: int
    """Of the machine."""
    world_size: int
    batch: BatchArithmetic
    parameters: int
    memory: dict[str, MemoryEstimate]
    flops_per_token: float
    phases: tuple[str, ...] = ()
    """One line each; the other figures are those of the phase with the largest micro batch."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, in full rows."""
        return self.batch.tokens_per_step * rows_per_sample(self.config)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types, with units in the names."""
        return {
            "cores": self.cores,
            "machine_memory_bytes": self.memory_bytes,
            "world_size": self.world_size,
            "batch": self.batch._asdict(),
            "parameters": self.parameters,
            "memory_bytes": {
                policy: {**estimate._asdict(), "total": estimate.total}
                for policy, estimate in self.memory.items()
            },
            "flops_per_token": self.flops_per_token,
            "flops_per_step": self.flops_per_token * self.tokens_per_step,
            **({"phases": self.phases} if self.phases else {}),
        }


def make_cpu_plan(config: RunConfig, world_size: int) -> CpuPlan:
    """Plan a run on this machine's CPU.

    Args:
        config: the run.
        world_size: number of ranks.

    Raises:
        ConfigError: the batch does not divide.
        TopologyError: tensor parallelism does not divide the ranks.
    """
    dp_size = validate_for_world(config, world_size).dp_size
    parts = [part.config for part in segments(config)]
    phases = tuple(describe_phases(config)) if len(parts) > 1 else ()
    config = max(parts, key=micro_batch_tokens)
    batch = batch_arithmetic(config, dp_size)

    def memory(policy: Literal["none", "selective", "full"]) -> MemoryEstimate:
        parallel = replace(config.parallel, recompute=policy)
        estimates = (
            estimate_memory(
                replace(part, parallel=parallel), dp_size, attention="chunked", device_type="cpu"
            )
            for part in parts
        )
        return max(estimates, key=lambda estimate: estimate.total)

    return CpuPlan(
        config=config,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        world_size=world_size,
        batch=batch,
        parameters=count_parameters(config.model),
        memory={policy: memory(policy) for policy in POLICIES},
        flops_per_token=pretraining_flops_per_token(
            config.model,
            config.objective,
            config.data.sequence_length,
            micro_batch_rows(config),
        ),
        phases=phases,
    )

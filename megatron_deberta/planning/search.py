"""Search of layouts: the fastest ones of a run on a machine, and why others do not run.

Tensor-parallel size, sequence parallelism, ZeRO stage, recomputation and micro batch vary; all
other settings stay.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_deberta.config.rules import validate_for_world
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import ConfigError, TopologyError
from megatron_deberta.planning.machine import Machine
from megatron_deberta.planning.memory import MemoryEstimate, estimate_memory
from megatron_deberta.planning.step import run_seconds

NEAR = 1.05
"""Layouts within this factor of the fastest count as equally fast."""
_STAGES: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
POLICIES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
_LAYOUT = {
    "tensor_parallel_size": "parallel",
    "sequence_parallel": "parallel",
    "recompute": "parallel",
    "zero_stage": "precision",
    "micro_batch_size": "train",
}
"""Keys that vary, and their sections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A layout that fits, with the duration of the run and the memory per rank."""

    config: RunConfig
    seconds: float
    memory_bytes: int

    def overrides(self) -> list[str]:
        """Return the overrides that select this layout."""
        values = layout(self.config)
        return [f"{section}.{key}={str(values[key]).lower()}" for key, section in _LAYOUT.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Layouts that cannot run."""

    layout: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Result of a search."""

    choices: list[Choice]
    """Fastest first, within ``NEAR`` simplest first; each with its fastest micro batch."""
    refusals: list[Refusal]


def search_layouts(
    config: RunConfig, machine: Machine, world_size: int, row_tokens: int | None = None
) -> Search:
    """Evaluate all parallel layouts of a run on a machine.

    Args:
        config: the run.
        machine: devices and links of the cluster.
        world_size: number of ranks.
        row_tokens: length of rows for the time of the run; None: full rows.
    """
    choices: list[Choice] = []
    refusals: list[Refusal] = []
    per_node = min(machine.ranks_per_node, world_size)
    for tp_size in (size for size in range(1, per_node + 1) if per_node % size == 0):
        for sequence in (False, True) if tp_size > 1 else (False,):
            parallel = replace(
                config.parallel, tensor_parallel_size=tp_size, sequence_parallel=sequence
            )
            split = replace(config, parallel=parallel)
            try:
                validate_for_world(_with_rows(split, 1), world_size)
            except (ConfigError, TopologyError) as error:
                refusals.append(Refusal(layout=f"TP {tp_size}", reason=str(error)))
                # Sequence parallelism would fail for the same reason.
                break
            for stage, policy in itertools.product(_STAGES, POLICIES):
                variant = replace(
                    split,
                    precision=replace(split.precision, zero_stage=stage),
                    parallel=replace(split.parallel, recompute=policy),
                )
                outcome = _fastest(variant, machine, world_size // tp_size, row_tokens)
                if isinstance(outcome, Choice):
                    choices.append(outcome)
                else:
                    refusals.append(outcome)
    return Search(choices=_ranked(choices), refusals=refusals)


def _ranked(choices: list[Choice]) -> list[Choice]:
    """Sort by time; those within ``NEAR`` of the fastest are sorted by complexity."""
    choices = sorted(choices, key=lambda choice: choice.seconds)
    limit = NEAR * choices[0].seconds if choices else 0.0
    near = [choice for choice in choices if choice.seconds <= limit]
    near.sort(key=lambda choice: (*_complexity(choice.config), choice.seconds))
    return near + choices[len(near) :]


def _fastest(
    config: RunConfig, machine: Machine, dp_size: int, row_tokens: int | None
) -> Choice | Refusal:
    """Return the fastest micro batch that fits and divides the global batch, or why none does."""
    choices = []
    rows_per_rank = config.train.global_batch_size // dp_size
    for rows in range(1, rows_per_rank + 1):
        if rows_per_rank % rows:
            continue
        candidate = _with_rows(config, rows)
        memory = rank_memory(candidate, machine, dp_size)
        if memory.total > machine.capacity_bytes:
            break
        seconds = run_seconds(candidate, machine, dp_size, row_tokens)
        choices.append(Choice(config=candidate, seconds=seconds, memory_bytes=memory.total))
    if choices:
        return min(choices, key=lambda choice: choice.seconds)
    memory = rank_memory(_with_rows(config, 1), machine, dp_size)
    return Refusal(
        layout=_describe(config),
        reason=f"one row needs {memory.total / 1e9:.1f} GB of {machine.capacity_bytes / 1e9:.1f}",
    )


def rank_memory(config: RunConfig, machine: Machine, dp_size: int) -> MemoryEstimate:
    """Estimate the memory of a rank with the attention backend of the run, or of the device.

    Args:
        config: the run.
        machine: devices and links of the cluster.
        dp_size: number of data-parallel ranks.
    """
    is_chunked = config.parallel.attention_backend in ("chunked", "efficient")
    attention = "chunked" if is_chunked else machine.device.attention
    return estimate_memory(config, dp_size, attention=attention)


def layout(config: RunConfig) -> dict[str, Any]:
    """Return the values of the keys that the search varies."""
    return {key: getattr(getattr(config, section), key) for key, section in _LAYOUT.items()}


def _with_rows(config: RunConfig, rows: int) -> RunConfig:
    return replace(config, train=replace(config.train, micro_batch_size=rows))


def _complexity(config: RunConfig) -> tuple[int, int, int]:
    parallel = config.parallel
    policy = POLICIES.index(parallel.recompute)
    return (config.precision.zero_stage, parallel.tensor_parallel_size, policy)


def _describe(config: RunConfig) -> str:
    parallel = config.parallel
    split = f"TP {parallel.tensor_parallel_size}{' + SP' if parallel.sequence_parallel else ''}"
    return f"{split}, ZeRO-{config.precision.zero_stage}, recompute {parallel.recompute}"

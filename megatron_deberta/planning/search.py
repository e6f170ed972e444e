"""Every layout of a run on a machine: which fit, which is fastest, why the others do not run.

Owns the grid: tensor-parallel size, sequence parallelism, ZeRO stage, recomputation and micro
batch. Everything else stays as the run has it, the global batch and the number format above all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, cast

from megatron_deberta.config.rules import validate_for_world
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import ConfigError, TopologyError
from megatron_deberta.planning.machine import Machine
from megatron_deberta.planning.memory import MemoryEstimate, estimate_memory
from megatron_deberta.planning.timing import run_seconds

NEAR = 1.05
"""Layouts within this factor of the fastest count as equally fast."""
_STAGES = (1, 2, 3)
_POLICIES = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A layout that fits."""

    config: RunConfig
    seconds: float
    """To the last step."""
    memory_bytes: int
    """On each rank."""

    def overrides(self) -> list[str]:
        """What turns the run into this one, as on a command line."""
        config, parallel = self.config, self.config.parallel
        return [
            f"parallel.tensor_parallel_size={parallel.tensor_parallel_size}",
            f"parallel.sequence_parallel={str(parallel.sequence_parallel).lower()}",
            f"parallel.recompute={parallel.recompute}",
            f"precision.zero_stage={config.precision.zero_stage}",
            f"train.micro_batch_size={config.train.micro_batch_size}",
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A part of the grid of which nothing runs."""

    layout: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What the grid holds."""

    choices: list[Choice]
    """Fastest first, within ``NEAR`` the simplest; of each layout the fastest micro batch."""
    refusals: list[Refusal]


def search_layouts(config: RunConfig, machine: Machine, world_size: int) -> Search:
    """Try the whole grid.

    Args:
        config: the run.
        machine: where.
        world_size: ranks in all.
    """
    choices: list[Choice] = []
    refusals: list[Refusal] = []
    per_node = min(machine.ranks_per_node, world_size)
    for tp_size in range(1, per_node + 1):
        if per_node % tp_size:
            continue
        for sequence in (False, True) if tp_size > 1 else (False,):
            parallel = replace(
                config.parallel, tensor_parallel_size=tp_size, sequence_parallel=sequence
            )
            split = replace(config, parallel=parallel)
            try:
                validate_for_world(_with_rows(split, 1), world_size)
            except (ConfigError, TopologyError) as error:
                refusals.append(Refusal(layout=f"TP {tp_size}", reason=str(error)))
                # With the sequence split, too, it is the same that does not divide.
                break
            for variant in _variants(split):
                outcome = _fastest(variant, machine, world_size // tp_size)
                if isinstance(outcome, Choice):
                    choices.append(outcome)
                else:
                    refusals.append(outcome)
    return Search(choices=_ranked(choices), refusals=refusals)


def _ranked(choices: list[Choice]) -> list[Choice]:
    """Fastest first, but those that the prediction cannot tell from the fastest simplest first."""
    choices = sorted(choices, key=lambda choice: choice.seconds)
    limit = NEAR * choices[0].seconds if choices else 0.0
    near = [choice for choice in choices if choice.seconds <= limit]
    near.sort(key=lambda choice: (*_complexity(choice.config), choice.seconds))
    return near + choices[len(near) :]


def _variants(config: RunConfig) -> Iterator[RunConfig]:
    for stage, policy in itertools.product(_STAGES, _POLICIES):
        yield replace(
            config,
            precision=replace(config.precision, zero_stage=cast(Literal[1, 2, 3], stage)),
            parallel=replace(
                config.parallel, recompute=cast(Literal["none", "selective", "full"], policy)
            ),
        )


def _fastest(config: RunConfig, machine: Machine, dp_size: int) -> Choice | Refusal:
    """The best micro batch that fits and divides the global batch, or why there is none."""
    best: Choice | None = None
    rows_per_rank = config.train.global_batch_size // dp_size
    for rows in range(1, rows_per_rank + 1):
        if rows_per_rank % rows:
            continue
        tried = _with_rows(config, rows)
        memory = rank_memory(tried, machine, dp_size)
        if memory.total > machine.capacity_bytes:
            break
        seconds = run_seconds(tried, machine, dp_size)
        if best is None or seconds < best.seconds:
            best = Choice(config=tried, seconds=seconds, memory_bytes=memory.total)
    if best is not None:
        return best
    memory = rank_memory(_with_rows(config, 1), machine, dp_size)
    return Refusal(
        layout=_describe(config),
        reason=f"one row needs {memory.total / 1e9:.1f} GB of {machine.capacity_bytes / 1e9:.1f}",
    )


def rank_memory(config: RunConfig, machine: Machine, dp_size: int) -> MemoryEstimate:
    """Memory of a rank with the attention backend that the device runs."""
    attention: Literal["triton", "chunked"] = (
        "triton" if machine.device.attention == "triton" else "chunked"
    )
    return estimate_memory(config, dp_size, attention=attention)


def _with_rows(config: RunConfig, rows: int) -> RunConfig:
    return replace(config, train=replace(config.train, micro_batch_size=rows))


def _complexity(config: RunConfig) -> tuple[int, int, int]:
    parallel = config.parallel
    policy = _POLICIES.index(parallel.recompute)
    return (config.precision.zero_stage, parallel.tensor_parallel_size, policy)


def _describe(config: RunConfig) -> str:
    parallel = config.parallel
    split = f"TP {parallel.tensor_parallel_size}{' + SP' if parallel.sequence_parallel else ''}"
    return f"{split}, ZeRO-{config.precision.zero_stage}, recompute {parallel.recompute}"

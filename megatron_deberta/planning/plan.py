"""The plan of a run: memory, FLOPs, traffic, time and layouts on a cluster, or costs on a CPU.

The search of layouts varies tensor-parallel size, sequence parallelism, ZeRO stage, recomputation
and micro batch; all other settings stay.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import psutil
import torch

from megatron_deberta.checkpoint.saver import FREE_SHARE, copy_bytes, state_bytes
from megatron_deberta.cluster.profile import check_dtype
from megatron_deberta.config.phases import describe_phases, phases_of, segments
from megatron_deberta.config.rules import (
    BatchArithmetic,
    batch_arithmetic,
    check_tensor_parallel_divides,
    validate_for_world,
)
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.errors import ConfigError, TopologyError
from megatron_deberta.model import count_parameters
from megatron_deberta.model.flops import pretraining_flops_per_token
from megatron_deberta.planning.machine import (
    CALL_SECONDS,
    FAILURE_DAYS,
    LINK_EFFICIENCY,
    RESERVED_MEMORY,
    Machine,
)
from megatron_deberta.planning.memory import (
    MemoryEstimate,
    estimate_memory,
    local_parameters,
    micro_batch_rows,
    micro_batch_tokens,
    rows_per_sample,
)
from megatron_deberta.planning.step import (
    LinkVolume,
    RankFlops,
    StepTime,
    bytes_per_score,
    link_volume,
    rank_flops,
    run_seconds,
    segment_seconds,
    step_time,
    step_traffic,
)

LIBRARY_BYTES = 1 << 30
"""Resident code and data of Python, torch and DeepSpeed in one process, rounded up."""
COPY_BYTES_PER_SECOND = 20e9
"""Assumed rate of copies from a device to host memory, per rank."""
KEPT_SAVES = 2
"""Saves on a node's disk while one is being written."""
NEAR = 1.05
"""Layouts within this factor of the fastest count as equally fast."""
_STAGES: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
Policy = Literal["none", "selective", "full"]
POLICIES: tuple[Policy, ...] = ("none", "selective", "full")
_LAYOUT = {
    "tensor_parallel_size": "parallel",
    "sequence_parallel": "parallel",
    "recompute": "parallel",
    "zero_stage": "parallel",
    "micro_batch_size": "train",
}
"""Keys that vary, and their sections."""


@dataclass(frozen=True, slots=True)
class LostTime:
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
        lost_seconds: time lost per failure.
    """

    every: int
    part_bytes: float
    disk_bytes: float
    host_bytes: float
    network_bytes: float
    stall_seconds: float
    step_seconds: float
    failures_per_day: float
    lost_seconds: LostTime

    @property
    def stall_share(self) -> float:
        """Share of the training time that saves take."""
        return self.stall_seconds / (self.every * self.step_seconds + self.stall_seconds)

    @property
    def saved_seconds_per_day(self) -> float:
        """Time per day that is not lost to failures, less the stalls; may be negative."""
        gained = self.failures_per_day * (self.lost_seconds.shared - self.lost_seconds.local)
        return gained - self.stall_share * 86400

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types, with units in the names."""
        return asdict(self) | {
            "stall_share": self.stall_share,
            "saved_seconds_per_day": self.saved_seconds_per_day,
        }


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """Costs of a run on any machine; of a run with phases, the one with the largest micro batch."""

    config: RunConfig
    world_size: int
    memory: dict[str, MemoryEstimate]
    """Per rank, by recomputation policy."""

    @property
    def batch(self) -> BatchArithmetic:
        """Division of the global batch."""
        dp_size = self.world_size // self.config.parallel.tensor_parallel_size
        return batch_arithmetic(self.config, dp_size)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return count_parameters(self.config.model)

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs, without recomputation."""
        model, objective, data = self.config.model, self.config.objective, self.config.data
        rows = micro_batch_rows(self.config)
        return pretraining_flops_per_token(model, objective, data.sequence_length, rows)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, in full rows."""
        return self.batch.tokens_per_step * rows_per_sample(self.config)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types, with units in the names."""
        rows = self.config.train.global_batch_size
        # A key of this format, also of runs without short rows.
        short_tokens = rows * self.config.data.short_sequence_length
        return {
            "world_size": self.world_size,
            "batch": self.batch._asdict() | {"short_tokens_per_step": short_tokens},
            "parameters": self.parameters,
            "memory_bytes": {
                policy: {**estimate._asdict(), "total": estimate.total}
                for policy, estimate in self.memory.items()
            },
            "flops_per_token": self.flops_per_token,
            "flops_per_step": self.flops_per_token * self.tokens_per_step,
        }


@dataclass(frozen=True, kw_only=True)
class CpuPlan(_Costs):
    """Predicted costs of a run on this machine's CPU, without times.

    No rate is assumed: it differs several-fold between processors, number formats and thread
    counts. ``pretrain`` measures it within a few steps and shows the time that is left.
    """

    cores: int
    memory_bytes: int
    """Of the machine."""
    phases: tuple[str, ...]
    """A line each; empty without phases."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types, with units in the names."""
        return {
            "cores": self.cores,
            "machine_memory_bytes": self.memory_bytes,
            **super().to_dict(),
            **({"phases": self.phases} if self.phases else {}),
        }


@dataclass(frozen=True, kw_only=True)
class RunPlan(_Costs):
    """Predicted costs of a run on a machine; FLOPs per rank."""

    machine: Machine
    rank_parameters: int
    """Per rank before ZeRO, including padding of the vocabulary."""
    micro_batch_flops: RankFlops
    volumes: list[LinkVolume]
    step: StepTime
    seconds: float
    search: Search | None
    phase_seconds: dict[str, float]
    """Time of each phase by its description; empty without phases."""
    local_saves: LocalSavePlan | None
    """None: the run saves no local checkpoints."""

    @property
    def copy_bytes(self) -> int:
        """Host memory of a node for the copy of a save in the background."""
        stage = self.config.parallel.zero_stage
        num_bytes = state_bytes(self.config.optimizer.ema_decay) * self.rank_parameters
        of_rank = copy_bytes(num_bytes, self.batch.dp_size, stage)
        return of_rank * min(self.world_size, self.machine.ranks_per_node)

    @property
    def saves_in_background(self) -> bool | None:
        """Whether scheduled checkpoints are asynchronous; None: the memory of nodes is unknown."""
        checkpoint = self.config.checkpoint
        if checkpoint.asynchronous != "auto":
            return checkpoint.asynchronous
        if not self.machine.host_gib:
            return None
        saves = 1 + (checkpoint.local_every is not None)
        return saves * self.copy_bytes <= FREE_SHARE * self.machine.host_gib * 2**30

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks, in full rows."""
        return self.tokens_per_step / self.step.total

    @property
    def utilization(self) -> float:
        """Predicted MFU: model FLOPs over the data sheet's matrix rate."""
        peak = self.machine.device.flops_per_second(self.config.precision.dtype) * self.world_size
        return self.tokens_per_second * self.flops_per_token / peak

    @property
    def assumptions(self) -> list[str]:
        """Assumptions behind the predicted time."""
        device, dtype = self.machine.device, self.config.precision.dtype
        per_score = bytes_per_score(self.config, device)
        lines = [
            f"{device.name}: {device.flops_per_second(dtype) / 1e12:g} TFLOP/s in {dtype}, "
            f"{device.memory_gb:g} GB at {device.memory_gb_per_second:g} GB/s (data sheet)",
            f"forward and backward reach {device.achieved:.0%} of that rate "
            f"({device.achieved_source}), for any micro batch and layer width",
        ]
        if per_score:
            lines.append(
                f"attention without fused kernels is bound by memory: {per_score:g} bytes per "
                "score in 16 bits (counted), added to the time of matrix products"
            )
        lines += [
            f"NVLink {device.link_gb_per_second:g} GB/s per rank, network "
            f"{self.machine.network_gb_per_second:g} GB/s per node, one way; collectives reach "
            f"{LINK_EFFICIENCY:.0%} of it, with a latency of {1e6 * CALL_SECONDS:g} us each",
            "tensor-parallel collectives are exposed; the reduction of gradients overlaps with the "
            "backward pass, the gathering of weights in ZeRO-3 with all computation",
            "no time for data, validation, checkpoints, stragglers and restarts",
            f"{RESERVED_MEMORY:.0%} of device memory is reserved for the driver, the communication "
            "library and fragmentation",
        ]
        if self.config.parallel.offload_optimizer:
            lines.append("transfers of offloaded optimizer state over PCIe take no time")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types, with units in the names."""
        search = self.search or Search(choices=[], refusals=[])
        phases = {name: seconds / 86400 for name, seconds in self.phase_seconds.items()}
        saves = self.local_saves
        return {
            **super().to_dict(),
            "ranks_per_node": self.machine.ranks_per_node,
            "device": asdict(self.machine.device),
            "layout": layout(self.config),
            "rank_parameters": self.rank_parameters,
            "capacity_bytes": self.machine.capacity_bytes,
            "micro_batch_flops": self.micro_batch_flops._asdict(),
            "communication": [
                {
                    **volume.traffic._asdict(),
                    "nvlink_bytes": volume.nvlink_bytes,
                    "network_bytes": volume.network_bytes,
                }
                for volume in self.volumes
            ],
            "step_seconds": {**self.step._asdict(), "total": self.step.total},
            "tokens_per_second": self.tokens_per_second,
            "utilization": self.utilization,
            "days": self.seconds / 86400,
            **({"phase_days": phases} if phases else {}),
            "checkpoint_copy_bytes": self.copy_bytes,
            "asynchronous_checkpoints": self.saves_in_background,
            **({} if saves is None else {"local_checkpoints": saves.to_dict()}),
            "assumptions": self.assumptions,
            "layouts": [
                {
                    **layout(choice.config),
                    "days": choice.seconds / 86400,
                    "memory_bytes": choice.memory_bytes,
                    "overrides": choice.overrides(),
                }
                for choice in search.choices
            ],
            "refused_layouts": [asdict(refusal) for refusal in search.refusals],
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

    def memory(policy: Policy) -> MemoryEstimate:
        estimates = (
            estimate_memory(
                _with_policy(part, policy), dp_size, attention="chunked", device_type="cpu"
            )
            for part in parts
        )
        return max(estimates, key=lambda estimate: estimate.total)

    return CpuPlan(
        config=max(parts, key=micro_batch_tokens),
        world_size=world_size,
        memory={policy: memory(policy) for policy in POLICIES},
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        phases=tuple(describe_phases(config)) if len(parts) > 1 else (),
    )


def make_plan(
    config: RunConfig,
    machine: Machine,
    world_size: int,
    *,
    search: bool,
    failure_days: float = FAILURE_DAYS,
    row_tokens: int | None = None,
) -> RunPlan:
    """Plan a run; of a run with phases, the step with the largest micro batch.

    Args:
        config: the run.
        machine: its machine.
        world_size: number of ranks.
        search: search the layouts as well, unless the run has phases or a batch ramp.
        failure_days: mean days between failures of one node.
        row_tokens: length of rows for the time of the run, if they are shorter than those for
            which it has memory; None: full rows.

    Raises:
        ConfigError: the batch does not divide, or the device does not support the number format.
        TopologyError: tensor parallelism or nodes do not divide the ranks.
    """
    _check_machine(config, machine, world_size)
    dp_size = validate_for_world(config, world_size).dp_size
    parts = segments(config)
    seconds = run_seconds(config, machine, dp_size, row_tokens)
    phases: dict[str, float] = {}
    if len(parts) > 1:
        phases = {
            line: sum(segment_seconds(part, machine, dp_size) for part in of_phase)
            for line, of_phase in zip(describe_phases(config), phases_of(config), strict=True)
        }
    # Of the parts of a run with short rows only the length differs.
    is_uniform = len({(part.phase, part.config.train) for part in parts}) == 1
    largest = max((part.config for part in parts), key=micro_batch_tokens)
    step = step_time(largest, machine, dp_size)
    return RunPlan(
        config=largest,
        world_size=world_size,
        memory={
            policy: rank_memory(_with_policy(largest, policy), machine, dp_size)
            for policy in POLICIES
        },
        machine=machine,
        rank_parameters=local_parameters(largest),
        micro_batch_flops=rank_flops(largest),
        volumes=[
            link_volume(traffic, largest, machine, dp_size)
            for traffic in step_traffic(largest, dp_size)
        ],
        step=step,
        seconds=seconds,
        search=search_layouts(config, machine, world_size, row_tokens)
        if search and is_uniform
        else None,
        phase_seconds=phases,
        local_saves=plan_local_saves(
            largest, machine, world_size, step.total, failure_days, parts[-1].end
        ),
    )


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
    stage = config.parallel.zero_stage
    shard = of_parameter * local_parameters(config)
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
        lost_seconds=LostTime(
            interval * step_seconds / 2, min(interval, checkpoint.local_every) * step_seconds / 2
        ),
    )


def _check_machine(config: RunConfig, machine: Machine, world_size: int) -> None:
    """Check that a machine supports the number format and number of ranks of a run.

    Args:
        config: the run.
        machine: devices and links of the cluster.
        world_size: number of ranks.

    Raises:
        ConfigError: the device does not support ``precision.dtype``.
        TopologyError: the ranks do not fill nodes, or a layer would be split across nodes.
    """
    check_dtype(config.precision.dtype, machine.dtypes)
    per_node = machine.ranks_per_node
    if world_size < 1:
        raise TopologyError(f"--ranks {world_size} must be at least 1, such as {per_node}")
    if world_size > per_node and world_size % per_node:
        below = world_size // per_node * per_node
        raise TopologyError(
            f"--ranks {world_size} does not fill nodes of {per_node} ranks; use {below} or "
            f"{below + per_node}"
        )
    check_tensor_parallel_divides(
        config.parallel.tensor_parallel_size, {"ranks_per_node": per_node}, error=TopologyError
    )


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
                # Sequence parallelism would fail for the same reason.
                break
            for stage, policy in itertools.product(_STAGES, POLICIES):
                staged = replace(split, parallel=replace(parallel, zero_stage=stage))
                variant = _with_policy(staged, policy)
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


def predict_rank_bytes(config: RunConfig) -> int:
    """Predict the peak memory of a rank of this job: of its GPU, or of its process."""
    on_gpu = torch.cuda.is_available() and config.train.device != "cpu"
    has_triton = on_gpu and torch.cuda.get_device_capability() >= (8, 0)
    without_kernels = config.parallel.attention_backend in ("chunked", "efficient")
    dp_size = validate_for_world(config, read_environment().world_size).dp_size
    tensors = max(
        estimate_memory(
            part.config,
            dp_size,
            attention="chunked" if without_kernels or not has_triton else "triton",
            device_type="cuda" if on_gpu else "cpu",
        ).total
        for part in segments(config)
    )
    return tensors if on_gpu else tensors + LIBRARY_BYTES


def layout(config: RunConfig) -> dict[str, Any]:
    """Return the values of the keys that the search varies."""
    return {key: getattr(getattr(config, section), key) for key, section in _LAYOUT.items()}


def _with_policy(config: RunConfig, policy: Policy) -> RunConfig:
    """Return a run with another recomputation."""
    return replace(config, parallel=replace(config.parallel, recompute=policy))


def _with_rows(config: RunConfig, rows: int) -> RunConfig:
    return replace(config, train=replace(config.train, micro_batch_size=rows))


def _complexity(config: RunConfig) -> tuple[int, int, int]:
    parallel = config.parallel
    policy = POLICIES.index(parallel.recompute)
    return (parallel.zero_stage, parallel.tensor_parallel_size, policy)


def _describe(config: RunConfig) -> str:
    parallel = config.parallel
    split = f"TP {parallel.tensor_parallel_size}{' + SP' if parallel.sequence_parallel else ''}"
    return f"{split}, ZeRO-{parallel.zero_stage}, recompute {parallel.recompute}"

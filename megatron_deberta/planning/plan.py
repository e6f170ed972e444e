"""The plan of a run: memory, FLOPs, traffic, time and layouts, as one value."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_deberta.checkpoint.held_state import FREE_SHARE, copy_bytes, state_bytes
from megatron_deberta.cluster.profile import check_dtype
from megatron_deberta.config.phases import describe_phases, phases_of, segments
from megatron_deberta.config.rules import (
    BatchArithmetic,
    batch_arithmetic,
    check_tensor_parallel_divides,
    validate_for_world,
)
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import TopologyError
from megatron_deberta.model import count_parameters
from megatron_deberta.model.flops import pretraining_flops_per_token
from megatron_deberta.planning.local_saves import LocalSavePlan, plan_local_saves
from megatron_deberta.planning.machine import (
    CALL_SECONDS,
    LINK_EFFICIENCY,
    RESERVED_MEMORY,
    Machine,
)
from megatron_deberta.planning.memory import MemoryEstimate, local_parameters
from megatron_deberta.planning.search import POLICIES, Search, layout, rank_memory, search_layouts
from megatron_deberta.planning.timing import (
    LinkVolume,
    StepTime,
    bytes_per_score,
    link_volume,
    run_seconds,
    segment_seconds,
    step_time,
)
from megatron_deberta.planning.traffic import step_traffic
from megatron_deberta.planning.work import (
    RankFlops,
    micro_batch_rows,
    micro_batch_tokens,
    rank_flops,
    rows_per_sample,
)

FAILURE_DAYS = 60.0
"""Assumed mean days between failures of one node: every few days one of 16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Predicted costs of a run on a machine; memory by recomputation policy, FLOPs per rank."""

    config: RunConfig
    machine: Machine
    world_size: int
    batch: BatchArithmetic
    parameters: int
    rank_parameters: int
    """Per rank before ZeRO, including padding of the vocabulary."""
    memory: dict[str, MemoryEstimate]
    flops_per_token: float
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
        stage = self.config.precision.zero_stage
        num_bytes = state_bytes(self.config.optimizer.ema_decay) * self.rank_parameters
        of_rank = copy_bytes(num_bytes, self.batch.dp_size, stage)
        return of_rank * min(self.world_size, self.machine.ranks_per_node)

    @property
    def saves_in_background(self) -> bool | None:
        """Whether scheduled checkpoints are asynchronous; None: the memory of nodes is unknown."""
        mode, local = (
            self.config.checkpoint.asynchronous,
            self.config.checkpoint.local_every is not None,
        )
        if mode != "auto":
            return mode
        if not self.machine.host_gib:
            return None
        return (1 + local) * self.copy_bytes <= FREE_SHARE * self.machine.host_gib * 2**30

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, in full rows."""
        return self.batch.tokens_per_step * rows_per_sample(self.config)

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
        offload = self.config.precision.offload_optimizer
        return [
            f"{device.name}: {device.flops_per_second(dtype) / 1e12:g} TFLOP/s in {dtype}, "
            f"{device.memory_gb:g} GB at {device.memory_gb_per_second:g} GB/s (data sheet)",
            f"forward and backward reach {device.achieved:.0%} of that rate "
            f"({device.achieved_source}), for any micro batch and layer width",
            *(
                [
                    "attention without fused kernels is bound by memory: "
                    f"{per_score:g} bytes per score in 16 bits (counted), added to "
                    "the time of matrix products"
                ]
                if per_score
                else []
            ),
            f"NVLink {device.link_gb_per_second:g} GB/s per rank, network "
            f"{self.machine.network_gb_per_second:g} GB/s per node, one way; collectives reach "
            f"{LINK_EFFICIENCY:.0%} of it, with a latency of {1e6 * CALL_SECONDS:g} us each",
            "tensor-parallel collectives are exposed; the reduction of gradients overlaps with the "
            "backward pass, the gathering of weights in ZeRO-3 with all computation",
            "no time for data, validation, checkpoints, stragglers and restarts",
            f"{RESERVED_MEMORY:.0%} of device memory is reserved for the driver, the communication "
            "library and fragmentation",
            *(["transfers of offloaded optimizer state over PCIe take no time"] if offload else []),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types, with units in the names."""
        search = self.search or Search(choices=[], refusals=[])
        rows = self.config.train.global_batch_size
        # A key of this format, also of runs without short rows.
        short_tokens = rows * self.config.data.short_sequence_length
        return {
            "world_size": self.world_size,
            "ranks_per_node": self.machine.ranks_per_node,
            "device": asdict(self.machine.device),
            "layout": layout(self.config),
            "batch": self.batch._asdict() | {"short_tokens_per_step": short_tokens},
            "parameters": self.parameters,
            "rank_parameters": self.rank_parameters,
            "memory_bytes": {
                policy: {**estimate._asdict(), "total": estimate.total}
                for policy, estimate in self.memory.items()
            },
            "capacity_bytes": self.machine.capacity_bytes,
            "flops_per_token": self.flops_per_token,
            "flops_per_step": self.flops_per_token * self.tokens_per_step,
            "micro_batch_flops": self.micro_batch_flops._asdict(),
            "communication": [
                {
                    **volume.traffic._asdict(),
                    "nvlink_bytes": volume.nvlink_bytes,
                    "network_bytes": volume.network_bytes,
                }
                for volume in self.volumes
            ],
            "step_seconds": {**asdict(self.step), "total": self.step.total},
            "tokens_per_second": self.tokens_per_second,
            "utilization": self.utilization,
            "days": self.seconds / 86400,
            **({"phase_days": _days(self.phase_seconds)} if self.phase_seconds else {}),
            "checkpoint_copy_bytes": self.copy_bytes,
            "asynchronous_checkpoints": self.saves_in_background,
            **_local_saves(self.local_saves),
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
    check_machine(config, machine, world_size)
    dp_size = validate_for_world(config, world_size).dp_size
    run, parts = config, segments(config)
    seconds = run_seconds(run, machine, dp_size, row_tokens)
    phases = _phase_seconds(run, machine, dp_size) if len(parts) > 1 else {}
    # Of the parts of a run with short rows only the length differs.
    is_uniform = len({(part.phase, part.config.train) for part in parts}) == 1
    config = max(parts, key=lambda part: micro_batch_tokens(part.config)).config
    batch = batch_arithmetic(config, dp_size)
    model, data = config.model, config.data
    step = step_time(config, machine, batch.dp_size)
    return RunPlan(
        config=config,
        machine=machine,
        world_size=world_size,
        batch=batch,
        parameters=count_parameters(model),
        rank_parameters=local_parameters(model, config.parallel.tensor_parallel_size),
        memory={
            policy: rank_memory(
                replace(config, parallel=replace(config.parallel, recompute=policy)),
                machine,
                batch.dp_size,
            )
            for policy in POLICIES
        },
        flops_per_token=pretraining_flops_per_token(
            model, config.objective, data.sequence_length, micro_batch_rows(config)
        ),
        micro_batch_flops=rank_flops(config),
        volumes=[
            link_volume(part, config, machine, batch.dp_size)
            for part in step_traffic(config, batch.dp_size)
        ],
        step=step,
        seconds=seconds,
        search=search_layouts(run, machine, world_size, row_tokens)
        if search and is_uniform
        else None,
        phase_seconds=phases,
        local_saves=plan_local_saves(
            config, machine, world_size, step.total, failure_days, parts[-1].end
        ),
    )


def _phase_seconds(config: RunConfig, machine: Machine, dp_size: int) -> dict[str, float]:
    return {
        line: sum(segment_seconds(part, machine, dp_size) for part in parts)
        for line, parts in zip(describe_phases(config), phases_of(config), strict=True)
    }


def _local_saves(plan: LocalSavePlan | None) -> dict[str, Any]:
    if plan is None:
        return {}
    values = {**asdict(plan), "lost_seconds": plan.lost._asdict()}
    del values["lost"]
    values["stall_share"] = plan.stall_share
    values["saved_seconds_per_day"] = plan.saved_seconds_per_day
    return {"local_checkpoints": values}


def _days(seconds: dict[str, float]) -> dict[str, float]:
    return {name: value / 86400 for name, value in seconds.items()}


def check_machine(config: RunConfig, machine: Machine, world_size: int) -> None:
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
        raise TopologyError(f"--world-size {world_size} must be at least 1, such as {per_node}")
    if world_size > per_node and world_size % per_node:
        below = world_size // per_node * per_node
        raise TopologyError(
            f"--world-size {world_size} does not fill nodes of {per_node} ranks; use {below} or "
            f"{below + per_node}"
        )
    check_tensor_parallel_divides(
        config.parallel.tensor_parallel_size, {"ranks_per_node": per_node}, error=TopologyError
    )

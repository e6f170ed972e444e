"""Predicted time of an optimizer step, by part.

Matrix products run at a share of the data sheet's rate, collectives at a share of their link's.
Data loading, checkpoints, validation, stragglers and restarts are not included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_deberta.config.phases import Segment, segments
from megatron_deberta.config.rules import batch_arithmetic
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.model.flops import num_position_terms
from megatron_deberta.model.replaced_tokens import single_models
from megatron_deberta.planning.devices import CHUNKED_BYTES, MEASURED, Device
from megatron_deberta.planning.machine import CALL_SECONDS, LINK_EFFICIENCY, Machine
from megatron_deberta.planning.memory import ELEMENT_BYTES, local_parameters
from megatron_deberta.planning.traffic import Traffic, step_traffic
from megatron_deberta.planning.work import micro_batch_rows, rank_flops

_ADAM_BYTES = 28
"""Memory traffic per fp32 master weight: four values read, three written."""
_BACKWARD_SHARE = 2 / 3
"""Share of a micro batch's time that hides the reduction of gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of an optimizer step by part.

    Of tensor-parallel collectives, the reduction of gradients and the gathering of weights only the
    exposed (blocking) time.
    """

    compute: float
    """Matrix products, including recomputation, and what runs between them."""
    attention: float
    """Memory traffic of attention without fused kernels, on devices before sm_80."""
    tensor_parallel: float
    gradients: float
    weights: float
    optimizer: float
    """Adam, bound by memory bandwidth."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return (
            self.compute
            + self.attention
            + self.tensor_parallel
            + self.gradients
            + self.weights
            + self.optimizer
        )


class LinkVolume(NamedTuple):
    """Traffic of an optimizer step, and its bytes on each kind of link."""

    traffic: Traffic
    wire_bytes: float
    """Sent per rank."""
    nvlink_bytes: float
    """Sent per rank inside its node."""
    network_bytes: float
    """Sent per node to other nodes."""


def link_volume(part: Traffic, config: RunConfig, machine: Machine, dp_size: int) -> LinkVolume:
    """Divide traffic over NVLink and network; tensor parallelism stays inside a node.

    Args:
        part: one kind of traffic of a step.
        config: the run.
        machine: devices and links of the cluster.
        dp_size: number of data-parallel ranks.
    """
    tp_size, between_replicas = config.parallel.tensor_parallel_size, part.group == "data"
    wire = part.wire_bytes(dp_size if between_replicas else tp_size)
    on_nvlink = not between_replicas or machine.ranks_per_node > tp_size
    across = between_replicas and dp_size * tp_size > machine.ranks_per_node
    # A ring leaves each node once; a node is part of one ring per tensor-parallel rank.
    return LinkVolume(part, wire, wire if on_nvlink else 0.0, wire * tp_size if across else 0.0)


def link_seconds(
    traffic: Iterable[Traffic], config: RunConfig, machine: Machine, dp_size: int
) -> float:
    """Return the seconds of consecutive collectives, each on the slower of its links.

    As many rings share a node's adapters as there are tensor-parallel ranks.

    Args:
        traffic: of the collectives.
        config: the run.
        machine: devices and links of the cluster.
        dp_size: number of data-parallel ranks.
    """
    seconds = 0.0
    for part in traffic:
        volume = link_volume(part, config, machine, dp_size)
        rates = []
        if volume.nvlink_bytes:
            rates.append(machine.device.link_gb_per_second)
        if volume.network_bytes:
            rates.append(machine.network_gb_per_second / config.parallel.tensor_parallel_size)
        rate = 1e9 * LINK_EFFICIENCY * min(rates, default=machine.device.link_gb_per_second)
        seconds += volume.wire_bytes / rate + part.calls * CALL_SECONDS
    return seconds


def step_time(config: RunConfig, machine: Machine, dp_size: int) -> StepTime:
    """Predict the seconds of an optimizer step, by part.

    Args:
        config: the run.
        machine: devices and links of the cluster.
        dp_size: number of data-parallel ranks.

    Raises:
        ConfigError: the batch does not divide over ``dp_size`` data-parallel ranks.
    """
    micro_batches = batch_arithmetic(config, dp_size).accumulation_steps
    device, stage = machine.device, config.precision.zero_stage
    flops = rank_flops(config)
    rate = device.achieved * device.flops_per_second(config.precision.dtype)
    one = (flops.training + flops.recomputed) / rate
    traffic = step_traffic(config, dp_size)

    def seconds(group: str, *purposes: str) -> float:
        chosen = [
            part
            for part in traffic
            if part.group == group and (not purposes or part.purpose in purposes)
        ]
        return link_seconds(chosen, config, machine, dp_size)

    gradients, small = seconds("data", "gradients"), seconds("data", "small weights")
    weights = seconds("data", "weights")
    # Stages 0 and 1 reduce during the backward pass of the last micro batch, the others of each.
    hidden = (1 if stage < 2 else micro_batches) * _BACKWARD_SHARE * one
    if stage == 3:
        # Weights are prefetched during forward and backward.
        exposed = max(0.0, gradients + weights - micro_batches * one)
        gradients, weights = 0.0, exposed + small
    else:
        gradients = max(0.0, gradients - hidden)
    count = local_parameters(config.model, config.parallel.tensor_parallel_size)
    updated = count / dp_size if stage else count
    return StepTime(
        compute=micro_batches * one,
        attention=micro_batches
        * attention_bytes(config, device)
        / (1e9 * device.memory_gb_per_second),
        tensor_parallel=seconds("tensor"),
        gradients=gradients,
        weights=weights,
        optimizer=updated * _ADAM_BYTES / (1e9 * device.memory_gb_per_second),
    )


def attention_bytes(config: RunConfig, device: Device) -> float:
    """Return the memory traffic of attention per rank and micro batch, besides matrix products.

    The mask decoder's further passes are left out: they have few queries.
    """
    scores, length = 0.0, config.data.sequence_length
    for model in single_models(config.model):
        heads = model.num_heads / config.parallel.tensor_parallel_size
        # Each position term has a score of its own, besides that of the contents.
        terms = (1 + num_position_terms(model)) / 3
        scores += model.num_layers * heads * micro_batch_rows(config) * length**2 * terms
    again = 4 / 3 if config.parallel.recompute == "full" else 1.0
    per_score = bytes_per_score(config, device)
    return scores * again * per_score * ELEMENT_BYTES[config.precision.dtype] / 2


def bytes_per_score(config: RunConfig, device: Device) -> float:
    """Return the memory traffic of attention per score; 0: included in the share of the rate."""
    if config.parallel.attention_backend == "chunked" and device.achieved_source != MEASURED:
        return CHUNKED_BYTES
    return device.attention_bytes


def run_seconds(
    config: RunConfig, machine: Machine, dp_size: int, row_tokens: int | None = None
) -> float:
    """Predict the seconds to the last step, including phases and the steps with shorter rows.

    Args:
        config: the run.
        machine: devices and links of the cluster.
        dp_size: number of data-parallel ranks.
        row_tokens: length of rows, if they are shorter than in the config; None: as there.
    """
    if row_tokens is not None and row_tokens < config.data.sequence_length:
        config = replace(config, data=replace(config.data, sequence_length=row_tokens))
    return sum(segment_seconds(part, machine, dp_size) for part in segments(config))


def segment_seconds(part: Segment, machine: Machine, dp_size: int) -> float:
    """Predict the seconds of a segment.

    Args:
        part: the segment.
        machine: devices and links of the cluster.
        dp_size: number of data-parallel ranks.
    """
    return part.steps * step_time(part.config, machine, dp_size).total

"""How long a step is predicted to take, part by part, under assumptions that are stated.

Owns the model of time: matrix products at a share of the data sheet's rate, collectives at a share
of their link's. Refuses everything it would have to guess: data loading, checkpoints, validation,
stragglers and restarts take no time here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_deberta.config.rules import batch_arithmetic
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.planning.machine import CALL_SECONDS, LINK_EFFICIENCY, Machine
from megatron_deberta.planning.memory import local_parameters
from megatron_deberta.planning.traffic import Traffic, step_traffic
from megatron_deberta.planning.work import rank_flops

_ADAM_BYTES = 28
"""Moved for each fp32 master weight: gradient, weight and moments read, the last three written."""
_BACKWARD_SHARE = 2 / 3
"""Of a micro batch's time, what gradients can be reduced behind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of an optimizer step, by part; communication only where nothing hides it."""

    compute: float
    """Matrix products, recomputation included, and what runs between them."""
    tensor_parallel: float
    """Collectives inside layers, which wait and are waited for."""
    gradients: float
    """Reduction between replicas beyond what backward hides."""
    weights: float
    """Gathering weights between replicas beyond what computation hides."""
    optimizer: float
    """Adam, bound by the device's memory."""

    @property
    def total(self) -> float:
        """All parts."""
        return self.compute + self.tensor_parallel + self.gradients + self.weights + self.optimizer


def crosses_nodes(group: str, config: RunConfig, machine: Machine, dp_size: int) -> bool:
    """Whether a group's collectives leave a node; tensor parallelism never does."""
    world = dp_size * config.parallel.tensor_parallel_size
    return group == "data" and world > machine.ranks_per_node


def link_seconds(
    traffic: Iterable[Traffic], config: RunConfig, machine: Machine, dp_size: int
) -> float:
    """Time of collectives one after the other, on the slower of the links they pass.

    Rings run through all ranks of a group: of a group that crosses nodes each node sends as much
    as one rank does, and as many groups share its adapters as a layer has ranks.
    """
    tp_size = config.parallel.tensor_parallel_size
    seconds = 0.0
    for part in traffic:
        size = tp_size if part.group == "tensor" else dp_size
        wire = part.wire_bytes(size)
        rates = []
        if part.group == "tensor" or machine.ranks_per_node > tp_size:
            rates.append(machine.device.link_gb_per_second)
        if crosses_nodes(part.group, config, machine, dp_size):
            rates.append(machine.network_gb_per_second / tp_size)
        rate = 1e9 * LINK_EFFICIENCY * min(rates, default=machine.device.link_gb_per_second)
        seconds += wire / rate + part.calls * CALL_SECONDS
    return seconds


def step_time(config: RunConfig, machine: Machine, dp_size: int) -> StepTime:
    """Predict a step.

    Args:
        config: the run.
        machine: where.
        dp_size: data-parallel ranks.

    Raises:
        ConfigError: the batch does not divide.
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
    # Stages 0 and 1 reduce behind the last micro batch's backward, the others behind each one's.
    hidden = (1 if stage < 2 else micro_batches) * _BACKWARD_SHARE * one
    if stage == 3:
        # Weights are gathered ahead of their layer, all through forward and backward.
        exposed = max(0.0, gradients + weights - micro_batches * one)
        gradients, weights = 0.0, exposed + small
    else:
        gradients = max(0.0, gradients - hidden)
    count = local_parameters(config.model, config.parallel.tensor_parallel_size)
    updated = count / dp_size if stage else count
    return StepTime(
        compute=micro_batches * one,
        tensor_parallel=seconds("tensor"),
        gradients=gradients,
        weights=weights,
        optimizer=updated * _ADAM_BYTES / (1e9 * device.memory_gb_per_second),
    )


def run_seconds(config: RunConfig, machine: Machine, dp_size: int) -> float:
    """Time to the last step, shorter rows at the start included."""
    short = config.data.short_steps
    seconds = (config.train.steps - short) * step_time(config, machine, dp_size).total
    if short:
        rows = replace(config.data, sequence_length=config.data.short_sequence_length)
        seconds += short * step_time(replace(config, data=rows), machine, dp_size).total
    return seconds

"""``plan --cluster cpu``: a run on this machine's CPU."""

from __future__ import annotations

import argparse
import json

from megatron_deberta.cli.arguments import refuse_options
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.planning.cpu import LIBRARY_BYTES, CpuPlan, make_cpu_plan

NAME = "cpu"


def report_cpu_plan(config: RunConfig, args: argparse.Namespace) -> str:
    """Return the plan as text, or as JSON.

    Raises:
        ConfigError: an option of ``plan`` is about GPUs, or see ``make_cpu_plan``.
        TopologyError: see ``make_cpu_plan``.
    """
    of_gpus = ["device", "achieved", "layouts", "failure_days"]
    refuse_options(args, of_gpus, f"is about GPUs, not for --cluster {NAME}")
    if (args.nodes or 1) > 1:
        raise ConfigError(f"--cluster {NAME} is this machine alone; omit --nodes {args.nodes}")
    plan = make_cpu_plan(config, args.world_size or 1)
    return json.dumps(plan.to_dict(), indent=1) if args.json else describe(plan)


def describe(plan: CpuPlan) -> str:
    """Format a plan, one ``name: value`` per line."""
    config, batch = plan.config, plan.batch
    needed = plan.memory[config.parallel.recompute].total
    has_room = plan.world_size * (needed + LIBRARY_BYTES) < plan.memory_bytes
    policies = ", ".join(
        f"{policy} {estimate.total / 2**30:.2g}" for policy, estimate in plan.memory.items()
    )
    rows = [
        ("machine", f"CPU, {plan.cores} cores, {plan.memory_bytes / 2**30:.1f} GiB"),
        ("model", f"{plan.parameters:,} parameters"),
        *(("phase", line) for line in plan.phases),
        (
            "ranks",
            f"{plan.world_size} = TP {config.parallel.tensor_parallel_size} x DP {batch.dp_size}, "
            f"{config.precision.dtype}; --world-size sets the number",
        ),
        (
            "batch",
            f"{config.train.global_batch_size:,} sequences = micro batch {batch.micro_batch_size} "
            f"x accumulation {batch.accumulation_steps} x DP {batch.dp_size}; "
            f"{plan.tokens_per_step:,} tokens per step",
        ),
        (
            "work",
            f"{plan.flops_per_token / 1e9:.3g} GFLOP per token, "
            f"{plan.flops_per_token * plan.tokens_per_step / 1e9:,.3g} GFLOP per step, "
            f"{config.train.steps:,} steps",
        ),
        (
            "memory",
            f"{needed / 2**30:.2g} GiB per rank, besides 1 GiB for the libraries: "
            f"{'fits' if has_room else 'does not fit, lower train.micro_batch_size'} "
            f"(by recomputation: {policies})",
        ),
        (
            "time",
            "not predicted for CPUs; pretrain shows tokens per second and the time left after "
            f"{config.log.every} steps",
        ),
    ]
    return "\n".join(f"{name + ':':<10}{text}" for name, text in rows)

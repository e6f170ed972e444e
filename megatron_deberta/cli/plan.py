"""Predict memory, FLOPs, traffic and time of a run on a cluster, without a GPU.

Prints memory per rank for each recomputation policy, the batch arithmetic, FLOPs, bytes per link,
the time per step and of the run, and all layouts that fit, fastest first, with the overrides that
select them. Counts are exact; times are predictions, printed with their assumptions. See
docs/planning.md.

Examples:
  megatron-deberta plan configs/runs/1.5b_dgx2.yaml --cluster dgx2
  megatron-deberta plan configs/runs/1.5b_h100.yaml --cluster dgx_h100 --world-size 128
  megatron-deberta plan RUN.yaml --cluster dgx_h100 --device H200 --achieved 0.42 --json
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron_deberta.cli.arguments import add_run_arguments
from megatron_deberta.cluster.profile import load_profile
from megatron_deberta.config import load_config
from megatron_deberta.errors import EXIT_DONE, ConfigError
from megatron_deberta.observe.console import format_duration
from megatron_deberta.planning.machine import machine_of
from megatron_deberta.planning.plan import RunPlan, make_plan
from megatron_deberta.planning.search import NEAR, Search

_WIDTH = 112
"""Columns if the output is not a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="PROFILE",
        help="cluster profile: dgx2, dgx_h100, or a YAML file of the same form",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="number of ranks (default: cluster.nodes times the profile's ranks per node)",
    )
    parser.add_argument(
        "--device", default="", metavar="NAME", help="GPU, such as A100 (default: the profile's)"
    )
    parser.add_argument(
        "--achieved",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="measured share of the data sheet's matrix rate, such as 0.4",
    )
    parser.add_argument(
        "--layouts",
        type=int,
        default=10,
        metavar="N",
        help="layouts to print (default: %(default)s); 0: no search",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Plan the run and print the result."""
    config = load_config(args.config, args.overrides)
    machine = machine_of(load_profile(args.cluster), args.device, args.achieved)
    world_size = args.world_size
    if world_size is None:
        if not config.cluster.nodes:
            raise ConfigError("cluster.nodes=0: give the number of ranks with --world-size")
        world_size = config.cluster.nodes * machine.ranks_per_node
    plan = make_plan(config, machine, world_size, search=args.layouts > 0)
    if args.json:
        print(json.dumps(plan.to_dict(), indent=1))
        return EXIT_DONE
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=_WIDTH)
    show(plan, console, args.layouts)
    return EXIT_DONE


def show(plan: RunPlan, console: Console, num_layouts: int) -> None:
    """Print a plan as tables."""
    config, batch = plan.config, plan.batch
    parallel = config.parallel
    console.print(
        f"{plan.parameters / 1e6:,.0f} million parameters on {plan.world_size} x "
        f"{plan.machine.device.name}: TP {parallel.tensor_parallel_size}"
        f"{' with sequence parallelism' if parallel.sequence_parallel else ''} x DP "
        f"{batch.dp_size}, ZeRO-{config.precision.zero_stage}, {config.precision.dtype}, recompute "
        f"{parallel.recompute}"
    )
    console.print(
        f"batch: {config.train.global_batch_size:,} sequences = micro batch "
        f"{batch.micro_batch_size} x accumulation {batch.accumulation_steps} x DP {batch.dp_size}; "
        f"{batch.tokens_per_step:,} tokens per step\n"
        f"work: {plan.flops_per_token / 1e9:.2f} GFLOP per token, "
        f"{plan.flops_per_token * batch.tokens_per_step / 1e15:,.2f} PFLOP per step, "
        f"{plan.rank_parameters / 1e6:,.1f} million parameters per rank"
    )
    console.print(_memory_table(plan))
    console.print(_traffic_table(plan))
    console.print(_time_table(plan))
    console.print(
        f"{plan.tokens_per_second:,.0f} tokens/s, {plan.utilization:.1%} of the data sheet's "
        f"matrix rate; {config.train.steps:,} steps in {format_duration(plan.seconds)}"
    )
    console.print("Predicted, not measured. Assumptions:")
    for assumption in plan.assumptions:
        console.print(f"- {assumption}")
    if plan.search is not None:
        _show_search(plan.search, console, num_layouts)


def _memory_table(plan: RunPlan) -> Table:
    capacity = plan.machine.capacity_bytes
    table = Table(
        title="peak memory per rank, GB, by recomputation", box=SIMPLE, title_justify="left"
    )
    table.add_column("part")
    parts = [
        ("weights", "weights"),
        ("gradients", "gradients"),
        ("optimizer", "optimizer"),
        ("communication buckets", "communication"),
        ("activations", "activations"),
        ("vocabulary: logits, gradient", "vocabulary"),
        ("backward of a layer", "workspace"),
        ("attention kernels", "kernels"),
        (f"total, of {capacity / 1e9:.1f}", "total"),
    ]
    for policy in plan.memory:
        chosen = policy == plan.config.parallel.recompute
        table.add_column(f"{policy}{' (chosen)' if chosen else ''}", justify="right")
    for title, name in parts:
        sizes = [getattr(estimate, name) for estimate in plan.memory.values()]
        cells = [
            f"{size / 1e9:,.2f}{'  does not fit' if name == 'total' and size > capacity else ''}"
            for size in sizes
        ]
        table.add_row(title, *cells)
    return table


def _traffic_table(plan: RunPlan) -> Table:
    table = Table(title="communication per optimizer step", box=SIMPLE, title_justify="left")
    table.add_column("what")
    table.add_column("kind")
    for title in ("calls", "tensors, GB", "NVLink, GB per rank", "network, GB per node"):
        table.add_column(title, justify="right")
    for volume in plan.volumes:
        part = volume.traffic
        table.add_row(
            f"{part.group}: {part.purpose}",
            part.kind,
            f"{part.calls:,}",
            f"{part.num_bytes / 1e9:,.3f}",
            f"{volume.nvlink_bytes / 1e9:,.3f}",
            f"{volume.network_bytes / 1e9:,.3f}",
        )
    return table


def _time_table(plan: RunPlan) -> Table:
    table = Table(title="predicted time per step, ms", box=SIMPLE, title_justify="left")
    parts = {
        "compute": plan.step.compute,
        "tensor parallel": plan.step.tensor_parallel,
        "gradients": plan.step.gradients,
        "weights": plan.step.weights,
        "optimizer": plan.step.optimizer,
        "total": plan.step.total,
    }
    for title in parts:
        table.add_column(title, justify="right")
    table.add_row(*(f"{1e3 * seconds:,.1f}" for seconds in parts.values()))
    return table


def _show_search(search: Search, console: Console, num_layouts: int) -> None:
    table = Table(
        title=f"{len(search.choices)} layouts fit, fastest first (simplest within {NEAR - 1:.0%})",
        box=SIMPLE,
        title_justify="left",
    )
    for title in ("TP", "SP", "ZeRO", "recompute", "micro batch", "memory, GB", "days"):
        table.add_column(title, justify="right")
    for choice in search.choices[:num_layouts]:
        parallel = choice.config.parallel
        table.add_row(
            str(parallel.tensor_parallel_size),
            "yes" if parallel.sequence_parallel else "no",
            str(choice.config.precision.zero_stage),
            parallel.recompute,
            str(choice.config.train.micro_batch_size),
            f"{choice.memory_bytes / 1e9:.1f}",
            f"{choice.seconds / 86400:.2f}",
        )
    console.print(table)
    if search.choices:
        console.print(f"overrides of the first: {' '.join(search.choices[0].overrides())}")
    else:
        console.print("no layout fits; use more ranks, shorter sequences or larger devices")
    if search.refusals:
        console.print("layouts that cannot run:")
    for refusal in search.refusals:
        console.print(f"- {refusal.layout}: {refusal.reason}")

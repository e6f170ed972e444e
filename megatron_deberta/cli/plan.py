"""Predict memory, FLOPs, traffic and time of a run on a cluster, without a GPU.

Prints memory per rank for each recomputation policy, the batch arithmetic, FLOPs, bytes per link,
the time per step and of the run, and all layouts that fit, fastest first, with the overrides that
select them. Counts are exact; times are predictions, printed with their assumptions. See
docs/planning.md.

Examples:
  megatron-deberta plan RUN.yaml
  megatron-deberta plan RUN.yaml --cluster cpu --ranks 2
  megatron-deberta plan configs/runs/1.5b_dgx2.yaml --cluster dgx2
  megatron-deberta plan configs/runs/1.5b_h100.yaml --cluster dgx_h100 --ranks 128
  megatron-deberta plan RUN.yaml --cluster dgx_h100 --device H200 --mfu 0.42 --json
  megatron-deberta plan RUN.yaml --cluster dgx2 --ranks 16 --task mnli --examples 392702
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron_deberta.cli.arguments import add_run_arguments, add_shared, number, refuse_options
from megatron_deberta.cluster.installation import query_gpus
from megatron_deberta.cluster.profile import ClusterProfile, load_profile
from megatron_deberta.config import RunConfig, load_config
from megatron_deberta.config.precision import CPU_FORMATS, PREFERRED, resolve_precision
from megatron_deberta.config.schema import AUTO, ModelConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.observe.console import format_duration
from megatron_deberta.planning.machine import DEVICES, FAILURE_DAYS, Device, machine_of

if TYPE_CHECKING:
    # These import torch, which --help does not need.
    from megatron_deberta.planning.plan import CpuPlan, LocalSavePlan, RunPlan, Search

CPU = "cpu"
"""Value of ``--cluster``: this machine's CPU."""
DEFAULT_PROFILE = "dgx_h100"
_LAYOUTS = 10
"""Layouts that are printed by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_arguments(parser, required=False)
    add_shared(
        parser, "--cluster",
        help="cluster profile: dgx2, dgx_h100, or a YAML file of the same form; cpu: this "
        "machine's CPU, without times (default: cpu with train.device=cpu, else this machine's "
        f"GPUs, or {DEFAULT_PROFILE})",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=number(int, 1), metavar="N",
        help="number of ranks (default: those of cluster.nodes full nodes, at least one)",
    )  # fmt: skip
    add_shared(
        parser, "--nodes", type=number(int, 1), help="number of full nodes, instead of --ranks"
    )
    parser.add_argument(
        "--device", default="", metavar="NAME", help="GPU, such as A100 (default: the profile's)"
    )
    parser.add_argument(
        "--mfu", type=float, metavar="SHARE",
        help="model FLOPs utilization, the share of the GPU's peak matrix rate that training "
        "reaches, such as 0.4, as pretrain prints it (default: an assumption, which is printed)",
    )  # fmt: skip
    parser.add_argument(
        "--layouts", type=number(int, 0), metavar="N",
        help=f"parallel layouts to print; 0: no search (default: {_LAYOUTS})",
    )  # fmt: skip
    add_shared(
        parser, "--task",
        help="plan fine-tuning the run's model on this task: a file, or a name such as mnli",
    )  # fmt: skip
    parser.add_argument(
        "--examples", type=number(int, 1), metavar="N",
        help="with --task: number of training examples, which determines the steps",
    )  # fmt: skip
    parser.add_argument(
        "--row-tokens", type=number(int, 4), metavar="N",
        help="with --task: mean length of a micro batch's longest row, for the time of the run "
        "(default: full rows); memory is always that of full rows",
    )  # fmt: skip
    add_shared(parser, "--settings", help="with --task: the task's settings, or none")
    parser.add_argument(
        "--failure-days", type=float, metavar="DAYS",
        help="with checkpoint.local_every: mean days between failures of one node (default: "
        f"{FAILURE_DAYS:g}, an assumption)",
    )  # fmt: skip
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> None:
    """Plan the run and print the result."""
    from megatron_deberta.finetune.data import planned_steps
    from megatron_deberta.planning.plan import make_plan
    from megatron_deberta.train.vocab_size import with_vocab_size

    path, overrides = args.config, list(args.overrides)
    if path is not None and "=" in path:
        path, overrides = None, [path, *overrides]
    if not args.task:
        refuse_options(args, ["examples", "row_tokens", "settings"], "needs --task NAME")
    config = with_vocab_size(_without_auto(load_config(path, [] if args.task else overrides)))
    if not config.checkpoint.local_every:
        refuse_options(args, ["failure_days"], "needs checkpoint.local_every above 0")
    if not args.task and config.finetune.task and config.finetune.epochs:
        config = planned_steps(config)
    if args.cluster == CPU or (not args.cluster and config.train.device == CPU):
        if args.task:
            raise ConfigError("--task needs --cluster PROFILE with devices, such as dgx2")
        print(_plan_cpu(config, args))
        return
    profile = load_profile(args.cluster, trusted=True) if args.cluster else default_profile()
    machine = machine_of(profile, args.device, args.mfu or 0.0)
    formats = [dtype for dtype in PREFERRED if dtype in machine.dtypes]
    world_size = _world_size(config, args, machine.ranks_per_node)
    if args.task:
        config = _task_config(config, args, overrides, world_size)
    config = resolve_precision(config, formats, is_cpu_process=False)
    failure_days = FAILURE_DAYS if args.failure_days is None else args.failure_days
    if not 0 < failure_days < math.inf:
        raise ConfigError(f"--failure-days {failure_days:g} must be above 0, such as 60")
    num_layouts = _LAYOUTS if args.layouts is None else args.layouts
    plan = make_plan(
        config, machine, world_size,
        search=num_layouts > 0, failure_days=failure_days, row_tokens=args.row_tokens,
    )  # fmt: skip
    if args.json:
        print(json.dumps(plan.to_dict(), indent=1))
        return
    # None: the terminal's.
    width = None if sys.stdout.isatty() else 112
    console = Console(file=sys.stdout, highlight=False, width=width)
    show(plan, console, num_layouts)


def _world_size(config: RunConfig, args: argparse.Namespace, per_node: int) -> int:
    """Return the number of ranks to plan for."""
    if args.nodes is not None and args.ranks is not None:
        raise ConfigError(
            f"--nodes {args.nodes} and --ranks {args.ranks} contradict each other; give one of them"
        )
    if args.ranks is not None:
        return int(args.ranks)
    world_size: int = (args.nodes or config.cluster.nodes or 1) * per_node
    if args.nodes is None and not args.cluster and not args.task:
        return _usable_devices(config, world_size)
    return world_size


def _usable_devices(config: RunConfig, devices: int) -> int:
    """Return the largest number of devices among which the global batch can be divided."""
    train, tp_size = config.train, config.parallel.tensor_parallel_size
    for dp_size in range(devices // tp_size, 0, -1):
        if train.global_batch_size % (train.micro_batch_size * dp_size) == 0:
            usable = dp_size * tp_size
            if usable < devices:
                print(
                    f"no --ranks: planning for {usable} of the {devices} devices, which "
                    f"train.global_batch_size={train.global_batch_size} allows with "
                    f"train.micro_batch_size={train.micro_batch_size}",
                    file=sys.stderr,
                )
            return usable
    return devices


def _without_auto(config: RunConfig) -> RunConfig:
    """Replace ``model.vocab_size: auto`` by the default of the key if no tokenizer is given."""
    if config.model.vocab_size != AUTO or config.tokenizer.path or config.data.train:
        return config
    rows = ModelConfig().vocab_size
    print(f"no tokenizer.path or data.train: planning for model.vocab_size={rows}", file=sys.stderr)
    return replace(config, model=replace(config.model, vocab_size=rows))


def _task_config(
    run: RunConfig, args: argparse.Namespace, overrides: list[str], world_size: int
) -> RunConfig:
    """Return the fine-tuning run that ``--task`` and its options describe."""
    from megatron_deberta.finetune.settings import planned_config

    if args.examples is None:
        raise ConfigError("--task needs --examples N, the number of training examples")
    return planned_config(
        run, args.task, args.examples, world_size, overrides, settings=args.settings
    )


def default_profile() -> ClusterProfile:
    """Return a node with this machine's GPUs if they are known, else the default; say which."""
    profile, where = load_profile(DEFAULT_PROFILE), f"--cluster {DEFAULT_PROFILE}"
    with suppress(ConfigError, IndexError):
        gpus = query_gpus("name,memory.total")
        if device := next((item for item in DEVICES if _is_device(item, *gpus[0])), None):
            where = "this machine"
            dtypes = ("fp16", "fp32") if device.attention == "chunked" else profile.dtypes
            profile = replace(profile, ranks_per_node=len(gpus), device=device.name, dtypes=dtypes)
    print(
        f"no --cluster: planning for {where}, {profile.ranks_per_node} x {profile.device} per "
        "node; --ranks sets the number of devices, --cluster cpu plans for this machine's CPU",
        file=sys.stderr,
    )
    return profile


def _is_device(device: Device, name: str, mebibytes: str) -> bool:
    """Return whether ``nvidia-smi`` describes a device by this name and memory."""
    size = int(mebibytes) * 2**20 / (device.memory_gb * 1e9) if mebibytes.isdigit() else 0
    return device.name.split("-")[0] in name and 0.9 < size < 1.15


def _plan_cpu(config: RunConfig, args: argparse.Namespace) -> str:
    """Return the plan as text, or as JSON.

    Raises:
        ConfigError: an option of ``plan`` is about GPUs, or see ``make_cpu_plan``.
        TopologyError: see ``make_cpu_plan``.
    """
    from megatron_deberta.planning.plan import make_cpu_plan

    of_gpus = ["device", "mfu", "layouts", "failure_days"]
    refuse_options(args, of_gpus, f"is about GPUs, not for --cluster {CPU}")
    if (args.nodes or 1) > 1:
        raise ConfigError(f"--cluster {CPU} is this machine alone; omit --nodes {args.nodes}")
    ranks = args.ranks or 1
    config = resolve_precision(config, CPU_FORMATS, is_cpu_process=ranks == 1)
    plan = make_cpu_plan(config, ranks)
    return json.dumps(plan.to_dict(), indent=1) if args.json else _describe_cpu_plan(plan)


def _describe_cpu_plan(plan: CpuPlan) -> str:
    """Format a plan, one ``name: value`` per line."""
    from megatron_deberta.planning.plan import LIBRARY_BYTES

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
            f"{config.precision.dtype}; --ranks sets the number",
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


def show(plan: RunPlan, console: Console, num_layouts: int) -> None:
    """Print a plan as tables.

    Args:
        plan: the plan.
        console: to print on.
        num_layouts: number of layouts shown of a search.
    """
    config, batch = plan.config, plan.batch
    parallel = config.parallel
    console.print(
        f"{plan.parameters / 1e6:,.0f} million parameters on {plan.world_size} x "
        f"{plan.machine.device.name}: TP {parallel.tensor_parallel_size}"
        f"{' with sequence parallelism' if parallel.sequence_parallel else ''} x DP "
        f"{batch.dp_size}, ZeRO-{config.parallel.zero_stage}, {config.precision.dtype}, recompute "
        f"{parallel.recompute}"
    )
    console.print(
        f"batch: {config.train.global_batch_size:,} sequences = micro batch "
        f"{batch.micro_batch_size} x accumulation {batch.accumulation_steps} x DP {batch.dp_size}; "
        f"{plan.tokens_per_step:,} tokens per step\n"
        f"work: {plan.flops_per_token / 1e9:.2f} GFLOP per token, "
        f"{plan.flops_per_token * plan.tokens_per_step / 1e15:,.2f} PFLOP per step, "
        f"{plan.rank_parameters / 1e6:,.1f} million parameters per rank"
    )
    console.print(_memory_table(plan))
    console.print("0.00: not in use at the moment of the peak, or less than 5 MB")
    console.print(_traffic_table(plan))
    console.print(_time_table(plan))
    console.print(
        f"{plan.tokens_per_second:,.0f} tokens/s, {plan.utilization:.1%} of the data sheet's "
        f"matrix rate; {config.train.steps:,} steps in {format_duration(plan.seconds)}"
    )
    for line, seconds in plan.phase_seconds.items():
        console.print(f"- {line}: {format_duration(seconds)}")
    known: dict[bool | None, str] = {
        True: "yes", False: "no", None: "if that is at most half of its free memory",
    }  # fmt: skip
    console.print(
        f"asynchronous checkpoints: {known[plan.saves_in_background]} (checkpoint.asynchronous="
        f"{str(config.checkpoint.asynchronous).lower()}); a copy takes "
        f"{plan.copy_bytes / 1e9:,.2f} GB of a node's memory"
    )
    if plan.local_saves is not None:
        _show_local_saves(plan.local_saves, console)
    console.print("Predicted, not measured. Assumptions:")
    for assumption in plan.assumptions:
        console.print(f"- {assumption}")
    if plan.search is not None:
        _show_search(plan.search, console, num_layouts)


def _show_local_saves(saves: LocalSavePlan, console: Console) -> None:
    """Print the cost and the benefit of local checkpoints."""
    console.print(
        f"local checkpoints every {saves.every:,} steps, per node: "
        f"{saves.part_bytes / 1e9:,.2f} GB written and "
        f"{saves.network_bytes / 1e9:,.2f} GB sent per save, "
        f"{saves.disk_bytes / 1e9:,.2f} GB of disk, {saves.host_bytes / 1e9:,.2f} GB of host "
        f"memory; stall {saves.stall_seconds:,.2f} s per save, {saves.stall_share:.2%} of the time"
    )
    interval = saves.every * saves.step_seconds
    written = saves.part_bytes * (1 + (saves.network_bytes > 0))
    console.print(
        f"saves do not delay training if each node writes at least "
        f"{written / interval / 1e6:,.1f} MB/s and sends "
        f"{saves.network_bytes / interval / 1e6:,.1f} MB/s"
    )
    console.print(
        f"at {saves.failures_per_day:.3g} failures per day (--failure-days) each loses "
        f"{format_duration(saves.lost_seconds.local)} of training instead of "
        f"{format_duration(saves.lost_seconds.shared)}, without the restart: "
        f"{saves.saved_seconds_per_day / 60:,.1f} minutes saved per day, stalls deducted"
    )


def _table(
    title: str, left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]]
) -> Table:
    """Return a table with left- and right-aligned columns."""
    table = Table(title=title, box=SIMPLE, title_justify="left")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _memory_table(plan: RunPlan) -> Table:
    capacity, chosen = plan.machine.capacity_bytes, plan.config.parallel.recompute
    parts = {
        "weights": "weights",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "communication": "communication buckets",
        "activations": "activations",
        "vocabulary": "vocabulary: logits, gradient",
        "workspace": "backward of a layer",
        "kernels": "attention kernels",
        "total": f"total, of {capacity / 1e9:.1f}",
    }

    def cell(name: str, size: float) -> str:
        return f"{size / 1e9:,.2f}{'  does not fit' * (name == 'total' and size > capacity)}"

    return _table(
        "peak memory per rank, GB, by recomputation",
        ["part"],
        [f"{policy}{' (chosen)' * (policy == chosen)}" for policy in plan.memory],
        (
            [title, *(cell(name, getattr(estimate, name)) for estimate in plan.memory.values())]
            for name, title in parts.items()
        ),
    )


def _traffic_table(plan: RunPlan) -> Table:
    return _table(
        "communication per optimizer step",
        ["what", "kind"],
        ["calls", "tensors, GB", "NVLink, GB per rank", "network, GB per node"],
        (
            (
                f"{item.traffic.group}: {item.traffic.purpose}",
                item.traffic.kind,
                f"{item.traffic.calls:,}",
                f"{item.traffic.num_bytes / 1e9:,.3f}",
                f"{item.nvlink_bytes / 1e9:,.3f}",
                f"{item.network_bytes / 1e9:,.3f}",
            )
            for item in plan.volumes
        ),
    )


def _time_table(plan: RunPlan) -> Table:
    parts = {**plan.step._asdict(), "total": plan.step.total}
    if not plan.step.attention:
        # With fused kernels it is part of the computation.
        del parts["attention"]
    return _table(
        "predicted time per step, ms",
        [],
        [part.replace("_", " ") for part in parts],
        [[f"{1e3 * seconds:,.1f}" for seconds in parts.values()]],
    )


def _show_search(search: Search, console: Console, num_layouts: int) -> None:
    from megatron_deberta.planning.plan import NEAR

    table = _table(
        f"{len(search.choices)} layouts fit, fastest first (simplest within {NEAR - 1:.0%})",
        [],
        ["TP", "SP", "ZeRO", "recompute", "micro batch", "memory, GB", "days"],
        (
            [
                str(choice.config.parallel.tensor_parallel_size),
                "yes" if choice.config.parallel.sequence_parallel else "no",
                str(choice.config.parallel.zero_stage),
                choice.config.parallel.recompute,
                str(choice.config.train.micro_batch_size),
                f"{choice.memory_bytes / 1e9:.1f}",
                f"{choice.seconds / 86400:.2f}",
            ]
            for choice in search.choices[:num_layouts]
        ),
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

"""Pretrain, as one rank of a run under torchrun, srun or mpirun, or alone.

Resumes from the newest intact checkpoint in train.run_dir, if there is one. SIGTERM, SIGUSR1 and
SIGUSR2 end the run after the current step with a checkpoint and exit code 75: start it again.
Ctrl-C does the same with exit code 130; a second Ctrl-C ends at once, without a checkpoint.

Examples:
  megatron-deberta pretrain RUN.yaml train.run_dir=runs/base
  torchrun --nproc-per-node 8 -m megatron_deberta pretrain RUN.yaml
  megatron-deberta pretrain RUN.yaml --dry-run
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter

from megatron_deberta.cli.arguments import add_run_arguments, add_shared
from megatron_deberta.config import BatchArithmetic, load_config, validate_for_world
from megatron_deberta.config.loader import config_to_yaml
from megatron_deberta.config.phases import describe_phases, segments
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.errors import EXIT_DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_arguments(parser)
    add_shared(parser, "--dry-run", "--allow-config-change")


def run(args: argparse.Namespace) -> int:
    """Train, or describe the run."""
    config = load_config(args.config, args.overrides)
    if args.dry_run:
        print(describe_run(config))
        return EXIT_DONE
    from megatron_deberta.rank_process import pretrain

    return pretrain(config, args.allow_config_change, ends_process=True)


def describe_run(config: RunConfig, ranks: int | None = None) -> str:
    """Format the resolved config, rank grid, batch arithmetic and parameters.

    Args:
        config: the run.
        ranks: number of ranks; None: that of the launcher, or else of ``cluster.nodes`` full nodes.

    Raises:
        ConfigError: the batch does not divide.
        TopologyError: the ranks do not divide.
    """
    from megatron_deberta.train.vocab_size import with_vocab_size

    config = with_vocab_size(config)
    finetune, epochs = config.finetune, config.finetune.epochs
    if finetune.task and (epochs or finetune.validations_per_epoch):
        from megatron_deberta.finetune.data import planned_steps

        config = planned_steps(config)
    environment = read_environment()
    world_size = environment.world_size if ranks is None else ranks
    if environment.launcher == "none" and ranks is None:
        world_size = max(1, (config.cluster.nodes or 0) * (config.cluster.ranks_per_node or 0))
    batch = validate_for_world(config, world_size)
    tp_size = config.parallel.tensor_parallel_size
    return "\n".join(
        (
            config_to_yaml(config),
            f"ranks: {world_size} = {batch.dp_size} data-parallel x {tp_size} tensor-parallel, "
            "rank = dp_rank * tp_size + tp_rank",
            *_batches(config, batch, epochs),
            "",
            *_parameter_table(config, tp_size),
        )
    )


def _batches(config: RunConfig, batch: BatchArithmetic, epochs: float | None) -> list[str]:
    """Format the batch arithmetic, or the phases."""
    if len(segments(config)) > 1:
        return [f"phase {n}: {line}" for n, line in enumerate(describe_phases(config), 1)]
    steps = config.train.steps
    amount = (
        f"{batch.tokens_per_step:,} tokens per step, {steps * batch.tokens_per_step:,} in "
        f"{steps:,} steps"
    )
    if config.finetune.task:
        # Rows are as long as their examples.
        passes = f" = {epochs:g} epochs" if epochs else ""
        amount = f"{steps:,} steps{passes}"
    return [
        f"batch: {config.train.global_batch_size} sequences = {batch.dp_size} data-parallel x "
        f"{batch.micro_batch_size} per micro batch x {batch.accumulation_steps} accumulated; "
        f"{amount}"
    ]


def _parameter_table(config: RunConfig, tp_size: int) -> list[str]:
    """Format one line per parameter, those of all layers together, and the sums."""
    from megatron_deberta.distributed.parallelize.plan import shard_spec
    from megatron_deberta.model.task_models import parameter_shapes

    shapes = parameter_shapes(config.model)
    times = Counter(map(_without_layer, shapes))
    lines = [f"{'parameter':<58}{'shape':>16}{'times':>7}{'elements':>16}  per rank"]
    for name, shape in {_without_layer(name): shape for name, shape in shapes.items()}.items():
        local = shard_spec(name, shape, 0, tp_size).local_shape
        lines.append(
            f"{name:<58}{_product(shape):>16}{times[name]:>7}"
            f"{times[name] * math.prod(shape):>16,}  {_product(local)}"
        )
    total = sum(map(math.prod, shapes.values()))
    local_total = sum(
        math.prod(shard_spec(name, shape, 0, tp_size).local_shape) for name, shape in shapes.items()
    )
    lines.append(f"{'all':<81}{total:>16,}  {local_total:,}")
    return lines


def _without_layer(name: str) -> str:
    return re.sub(r"\.layers\.\d+\.", ".layers.N.", name)


def _product(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))

"""Time that training waits per save: synchronous, asynchronous and local.

Four gloo ranks, TP2 x DP2, ZeRO-1, as two nodes with folders of their own. The kinds of save take
turns, with training steps between them until the save is finished.

    torchrun --nproc-per-node 4 -m benchmarks.step.save_stalls \
        --output benchmarks/results/cpu/save_stalls.json
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lib.measuring import write_json
from benchmarks.lib.provenance import provenance
from benchmarks.step.batch import make_batch
from megatron_deberta.checkpoint.layout import CheckpointMetadata
from megatron_deberta.checkpoint.local.saver import LocalSaver, Nodes
from megatron_deberta.checkpoint.retention import Retention
from megatron_deberta.checkpoint.saver import Saver
from megatron_deberta.config import config_to_dict
from megatron_deberta.config.schema import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.distributed.topology import ProcessGroups, init_process_groups, shutdown
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.model import count_parameters
from megatron_deberta.train.setup import build_rank_model
from megatron_deberta.train.step import TrainStep

TP_SIZE, DP_SIZE, RANKS_PER_NODE = 2, 2, 2
ROWS, LENGTH = 2, 16  # of a micro batch; steps are short, so that saves are not waited for in them
KINDS = ("synchronous", "asynchronous", "local")
_MOST_STEPS = 1000


def config_of(hidden_size: int, layers: int) -> RunConfig:
    """Return the run."""
    return RunConfig(
        model=ModelConfig(
            num_layers=layers, hidden_size=hidden_size, num_heads=4, vocab_size=256,
            ffn_hidden_size=4 * hidden_size, max_position_embeddings=LENGTH,
            max_relative_positions=LENGTH, position_buckets=None, conv_kernel_size=3,
        ),
        parallel=ParallelConfig(engine="deepspeed", zero_stage=1, tensor_parallel_size=TP_SIZE),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=4),
        precision=PrecisionConfig(dtype="fp32"),
        train=TrainConfig(
            steps=100_000, global_batch_size=ROWS * DP_SIZE, micro_batch_size=ROWS, device="cpu"
        ),
    )  # fmt: skip


def measure(
    groups: ProcessGroups, folder: str, config: RunConfig, turns: int
) -> list[dict[str, Any]]:
    """Save in turn; return kind, stall and duration of each save, and a step's time, in seconds."""
    batch = make_batch(config.model, ROWS * LENGTH, LENGTH, groups.device).unpadded()
    nodes = Nodes.connect(groups, 5.0)
    model = build_rank_model(config, groups)
    engine = build_engine(config, model.module, model.specs, groups)
    take_step = TrainStep(engine, config, groups)
    saver = Saver(f"{folder}/run", engine, model.specs, groups)
    local = LocalSaver(
        Path(folder, nodes.names[dist.get_rank()], "run"), engine, model.specs, groups, nodes, 1
    )
    step, rows = 0, []

    def train() -> float:
        nonlocal step
        began = time.monotonic()
        take_step(step, [batch])
        step += 1
        return time.monotonic() - began

    # The first turn warms up.
    for turn in range(turns + 1):
        for kind in KINDS:
            seconds = train()
            metadata = CheckpointMetadata(
                step=step, consumed_samples=step, config=config_to_dict(config),
                tokenizer_fingerprint="", tokenizer_path="",
            )  # fmt: skip
            saved: Any = None
            if kind == "synchronous":
                saved = saver.save(metadata, Retention(keep_last=1))
            elif kind == "asynchronous":
                saver.start(metadata, Retention(keep_last=1))
            else:
                local.start(metadata)
            for _ in range(_MOST_STEPS):
                if saved is not None:
                    break
                train()
                saved = saver.poll() if kind == "asynchronous" else local.poll()
            if turn:
                rows.append({
                    "kind": kind, "stall_seconds": saved.blocked_seconds,
                    "save_seconds": saved.seconds, "step_seconds": seconds,
                })  # fmt: skip
    engine.destroy()
    return rows


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    config = config_of(args.hidden_size, args.layers)
    environment = read_environment()
    os.environ["SLURMD_NODENAME"] = f"node{environment.rank // RANKS_PER_NODE}"
    groups = init_process_groups(TP_SIZE, torch.device("cpu"), 10, environment)
    # The same on every rank, and no other run on this machine has this port.
    folder = f"{tempfile.gettempdir()}/save_stalls-{environment.master_port}"
    try:
        rows = measure(groups, folder, config, args.turns)
    finally:
        shutdown()
        if environment.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if environment.rank == 0:
        write(args, config, rows)


def write(args: argparse.Namespace, config: RunConfig, rows: list[dict[str, Any]]) -> None:
    """Print the medians and write the result."""
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    medians = {
        kind: {
            key: statistics.median(row[key] for row in found)
            for key in ("stall_seconds", "save_seconds", "step_seconds")
        }
        for kind, found in kinds.items()
    }
    for kind, values in medians.items():
        print(kind, {key: round(value, 4) for key, value in values.items()})
    record = {
        **provenance(), "layout": "TP2 x DP2, ZeRO-1, fp32, two nodes on one machine",
        "parameters": count_parameters(config.model), "turns": args.turns,
        "medians": medians, "results": rows,
    }  # fmt: skip
    write_json(args.output, record)


if __name__ == "__main__":
    main()

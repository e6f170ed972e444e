"""What the numeric guard costs, and how often it skips an update that was fine.

  python -m benchmarks.step.guard --work /tmp/guard --output benchmarks/results/cpu/guard.json

A small model learns real text for some thousand steps with the default limits; every skip there is
a false one. Then the same losses and norms are judged again, each with a spike of ten standard
deviations put in its place. Costs are of one process: judging a step, and the checksums of the
weights of the paper's base model.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.lib.measuring import write_json
from benchmarks.lib.provenance import ROOT, provenance
from benchmarks.lib.shards import prepare_shards
from megatron_deberta.cli.main import main as command
from megatron_deberta.config import GuardConfig, load_config
from megatron_deberta.engine.protocol import StepOutcome
from megatron_deberta.model.shapes import parameter_shapes
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics
from megatron_deberta.train.stability.guard import Guard
from megatron_deberta.train.stability.replicas import checksum

RUN = """
model: {{num_layers: 2, hidden_size: 32, num_heads: 4, ffn_hidden_size: 64, vocab_size: 600,
  max_position_embeddings: 48, max_relative_positions: 32, position_buckets: 8,
  conv_kernel_size: 3}}
tokenizer: {{path: {tokenizer}}}
data: {{train: [{prefix}], sequence_length: 48}}
train: {{global_batch_size: 8, device: cpu}}
log: {{every: 1, tensorboard: false}}
"""


def train(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Metric records of a run with the default guard; one that was broken off goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    run, run_dir = folder / "run.yaml", folder / "run"
    if not run.exists():
        shards = prepare_shards(folder, 1.0, 500)
        run.write_text(RUN.format(tokenizer=shards.tokenizer, prefix=shards.prefix))
    arguments = [
        "pretrain", str(run), f"train.run_dir={run_dir}", f"train.steps={steps}",
        "precision.engine=plain", "train.eval_every=0", "data.sample_log=false",
        "data.num_workers=0", "train.micro_batch_size=8", "checkpoint.save_every=250",
        "log.level=warning",
        "optimizer.learning_rate=2.0e-3", f"optimizer.warmup_steps={steps // 10}",
    ]  # fmt: skip
    assert command(arguments) == 0
    return read_metrics(run_dir / FILE_NAME)


def found_spikes(numbers: list[float], kind: str, every: int = 20) -> dict[str, int]:
    """Put a spike of ten deviations at every so many steps; how many there were and were found.

    Args:
        numbers: by step.
        kind: ``loss``, or ``norm``, whose deviations are those of the logarithm.
        every: steps between spikes.
    """
    config = GuardConfig()
    guard, found, planted = Guard(config), 0, 0
    for step, number in enumerate(numbers, start=1):
        loss, norm = (number, 1.0) if kind == "loss" else (1.0, number)
        past = guard.state.losses if kind == "loss" else list(map(math.log, guard.state.norms))
        if len(past) >= config.spike_warmup and step % every == 0:
            planted += 1
            spike = statistics.fmean(past) + 10 * statistics.pstdev(past)
            if kind == "loss":
                found += guard.check_loss(spike) is not None
            else:
                found += math.exp(spike) > guard.norm_limit()
        guard.record(step, loss, StepOutcome(norm, False, 1.0), None)
    return {"planted": planted, "found": found}


def linear_skips(norms: list[float]) -> int:
    """How many of the norms would be spikes if they were not compared by logarithm."""
    guard, skips = Guard(GuardConfig()), 0
    for step, norm in enumerate(norms, start=1):
        skip = guard.check_loss(norm)
        skips += skip is not None
        guard.record(step, norm, StepOutcome(1.0, False, 1.0), skip)
    return skips


def judging_seconds(repeats: int = 500) -> float:
    """Median time of one step's judgements with a full window."""
    guard, times = Guard(GuardConfig()), []
    for step in range(1, repeats):
        start = time.perf_counter()
        guard.check_loss(2.0 + step % 3)
        guard.norm_limit()
        guard.record(step, 2.0 + step % 3, StepOutcome(1.0, False, 1.0), None)
        times.append(time.perf_counter() - start)
    return statistics.median(times[200:])


def checksum_seconds(repeats: int = 5) -> tuple[int, float]:
    """Parameters of the base model, and the median time of all their checksums."""
    shapes = parameter_shapes(load_config(str(ROOT / "configs" / "models" / "base.yaml"), []).model)
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes.values()]
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.stack([checksum(weight) for weight in weights]).tolist()
        times.append(time.perf_counter() - start)
    return sum(weight.numel() for weight in weights), statistics.median(times)


def measure(folder: Path, steps: int) -> dict[str, Any]:
    """All of it."""
    records = train(folder, steps)
    torch.use_deterministic_algorithms(False)
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    norms = [record["grad_norm"] for record in records if record["kind"] == "train"]
    parameters, seconds = checksum_seconds()
    result: dict[str, Any] = {
        "steps": len(losses),
        "loss": {"first": losses[0], "last": losses[-1]},
        "false_skips": [record for record in records if record["kind"] == "guard"],
        "judging_seconds": judging_seconds(),
        "checksum": {"parameters": parameters, "dtype": "fp32", "seconds": seconds},
    }
    result["spikes in the loss"] = found_spikes(losses, "loss")
    result["spikes in the norm"] = found_spikes(norms, "norm")
    result["false_skips_without_logarithm"] = linear_skips(norms)
    return result


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Cost and errors of the numeric guard.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of the run")
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    write_json(args.output, {"provenance": provenance(), "results": measure(args.work, args.steps)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Layout matrix: the same run on every layout has the same losses and gradients.

Four gloo ranks, dropout on, fp32, the real model, engine and step; the reference is one process
with the reference engine. ``python -m tests.support.layout_matrix --output FILE`` runs the whole
matrix (``make test-matrix``), skipping layouts in FILE; the test suite runs a selection.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.parallelize import ParameterSpec, ShardedModel
from megatron_deberta.distributed.topology import ProcessGroups, single_process_groups
from megatron_deberta.engine import deepspeed_engine
from megatron_deberta.engine.base import Engine
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.train.setup import build_rank_model
from megatron_deberta.train.step import TrainStep
from tests.support.ranks import RankPool, grid
from tests.support.tolerances import LAYOUT_GRADIENT, LAYOUT_LOSS
from tests.support.toy_engine import states

STEPS, GLOBAL_BATCH, MICRO_BATCH, LENGTH = 20, 8, 2, 16
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    ffn_hidden_size=64,
    vocab_size=131,
    max_position_embeddings=32,
    max_relative_positions=16,
    position_buckets=4,
    conv_kernel_size=3,
)


@dataclass(frozen=True)
class Layout:
    """A layout of four ranks."""

    tp_size: int
    zero_stage: int
    sequence_parallel: bool
    recompute: str

    @property
    def name(self) -> str:
        sequence = "sp" if self.sequence_parallel else "-"
        return f"tp{self.tp_size} zero{self.zero_stage} {sequence} recompute={self.recompute}"


ALL = [
    Layout(tp, zero, sequence, recompute)
    for recompute, tp, zero, sequence in itertools.product(
        ("none", "full", "selective"), (1, 2, 4), (0, 1, 2, 3), (False, True)
    )
    if tp > 1 or not sequence
]
PAIRS = [
    Layout(1, 0, False, "full"),
    Layout(1, 1, False, "none"),
    Layout(1, 2, False, "selective"),
    Layout(1, 3, False, "full"),
    Layout(2, 0, True, "none"),
    Layout(2, 1, False, "full"),
    Layout(2, 2, True, "full"),
    Layout(2, 3, False, "selective"),
    Layout(2, 3, True, "none"),
    Layout(4, 0, False, "selective"),
    Layout(4, 1, True, "selective"),
    Layout(4, 2, False, "none"),
    Layout(4, 3, True, "full"),
]
"""A selection that contains every pair of settings (checked by a test)."""


def run_config(
    layout: Layout | None, segments: bool = False, micro_batch: int = MICRO_BATCH
) -> RunConfig:
    """Return the config of a layout; None: the reference. ``segments``: rows are segment pairs."""
    chosen = layout or Layout(1, 0, False, "none")
    model = replace(MODEL, type_vocab_size=2, next_sentence_head=True) if segments else MODEL
    return RunConfig(
        model=model,
        parallel=ParallelConfig(
            engine="deepspeed" if layout else "plain",
            zero_stage=chosen.zero_stage,  # type: ignore[arg-type]
            tensor_parallel_size=chosen.tp_size,
            sequence_parallel=chosen.sequence_parallel,
            recompute=chosen.recompute,  # type: ignore[arg-type]
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1),
        train=TrainConfig(
            steps=2 * STEPS, global_batch_size=GLOBAL_BATCH, micro_batch_size=micro_batch
        ),
    )


def micro_batches(
    step: int, groups: ProcessGroups, segments: bool = False, micro_batch: int = MICRO_BATCH
) -> list[Batch]:
    """Return this rank's rows of the global batch of a step, some of them padded."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(4, MODEL.vocab_size, (GLOBAL_BATCH, LENGTH), generator=generator)
    real = torch.full((GLOBAL_BATCH,), LENGTH)
    real[1::3] -= 5
    mask = torch.arange(LENGTH) < real.unsqueeze(1)
    picked = torch.rand(GLOBAL_BATCH, LENGTH - 5, generator=generator).argsort(1)[:, :3]
    picked[::2, 2] = -1
    labels = torch.where(picked >= 0, ids.gather(1, picked.clamp(min=0)), -100)
    ids = ids.masked_fill(~mask, 0)
    samples = torch.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
    types = ((torch.arange(LENGTH) >= real.unsqueeze(1) // 2) & mask).long()
    next_sentence = torch.randint(2, (GLOBAL_BATCH,), generator=generator)
    share = GLOBAL_BATCH // groups.dp_size
    first = groups.dp_rank * share
    return [
        Batch(
            ModelInputs(ids[rows], mask[rows], token_type_ids=types[rows] if segments else None),
            picked[rows],
            labels[rows],
            samples[rows],
            next_sentence_labels=next_sentence[rows] if segments else None,
        )
        for rows in (
            slice(start, start + micro_batch) for start in range(first, first + share, micro_batch)
        )
    ]


def moments(engine: Engine, specs: dict[str, ParameterSpec]) -> dict[str, Any]:
    """Return the first moments and specs: after one step, the clipped gradient times 1 - beta1."""
    return {
        name: (specs[name], specs[name].true_part(state.exp_avg).clone())
        for name, state in states(engine).items()
    }


def groups_of(layout: Layout | None) -> ProcessGroups:
    """Return this rank's groups; without a layout, those of one process."""
    return grid(layout.tp_size) if layout else single_process_groups(torch.device("cpu"))


def build(
    config: RunConfig,
    groups: ProcessGroups,
    watch: Callable[[nn.Module], object] = lambda _: None,
) -> tuple[ShardedModel, Engine]:
    """Return this rank's model and its engine; ``watch`` is called with the model before."""
    # Tensors of this size would not be partitioned otherwise.
    deepspeed_engine.PERSISTENCE_THRESHOLD = 0
    model = build_rank_model(config, groups)
    model.module.train()
    watch(model.module)
    return model, build_engine(config, model.module, model.specs, groups)


def run_layout(
    rank: int, layout: Layout | None, steps: int, segments: bool = False
) -> dict[str, Any]:
    """Return losses, gradient norms and moments of one run on this rank."""
    return run_steps(
        layout, steps, segments=segments, losses=("next_sentence_loss",) if segments else ()
    )


def run_steps(
    layout: Layout | None,
    steps: int,
    *,
    segments: bool = False,
    configure: Callable[[RunConfig], RunConfig] = lambda config: config,
    change: Callable[[int, Batch], Batch] = lambda _, batch: batch,
    watch: Callable[[nn.Module], object] = lambda _: None,
    losses: Sequence[str] = (),
    norms: Sequence[str] = (),
) -> dict[str, Any]:
    """Train steps of two micro batches, whatever the layout, on this rank.

    Args:
        layout: None: the reference.
        steps: number of steps.
        segments: rows are segment pairs.
        configure: returns the config to run from that of the layout.
        change: returns the batch to train on at a step.
        watch: called with the model before the engine is built.
        losses: metrics of a step to return beside its loss.
        norms: metrics of a step to return beside its gradient norm.

    Returns:
        Losses, gradient norms, and the moments after the first and the last step.
    """
    groups = groups_of(layout)
    micro_batch = GLOBAL_BATCH // groups.dp_size // 2
    config = configure(run_config(layout, segments, micro_batch))
    model, engine = build(config, groups, watch)
    take_step = TrainStep(engine, config, groups)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(steps):
        batches = micro_batches(step, groups, segments, micro_batch)
        result = take_step(step, [change(step, batch) for batch in batches])
        found["losses"] += [result.loss, *(result.metrics[name] for name in losses)]
        found["norms"] += [result.outcome.grad_norm, *(result.metrics[name] for name in norms)]
        if step == 0:  # The moments started at zero, so they contain this step's gradient only.
            found["first"] = moments(engine, model.specs)
    found["last"] = moments(engine, model.specs)
    engine.destroy()
    return found


def assemble(parts: list[tuple[ParameterSpec, Tensor]], tp_size: int) -> Tensor:
    """Join the logical tensor of the first ``tp_size`` ranks; replicas must be bit-identical."""
    spec = parts[0][0]
    for index, (_, part) in enumerate(parts):
        twin = parts[index % tp_size][1] if spec.dim is not None else parts[0][1]
        torch.testing.assert_close(part, twin, rtol=0, atol=0)
    if spec.dim is None:
        return parts[0][1]
    return torch.cat([part for _, part in parts[:tp_size]], spec.dim)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative Frobenius error."""
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def compare(
    layout: Layout, ranks: list[dict[str, Any]], reference: dict[str, Any]
) -> dict[str, Any]:
    """Return the largest deviations of a layout from the reference."""
    worst_loss = max(
        abs(a - b) / abs(b)
        for rank in ranks
        for a, b in zip(rank["losses"], reference["losses"], strict=True)
    )
    worst_norm = max(
        abs(a - b) / abs(b)
        for rank in ranks
        for a, b in zip(rank["norms"], reference["norms"], strict=True)
    )
    errors = {}
    for name, (_, expected) in reference["first"].items():
        actual = assemble([rank["first"][name] for rank in ranks], layout.tp_size)
        errors[name] = relative_error(actual, expected)
    parameter = max(errors, key=errors.__getitem__)
    return {
        **asdict(layout),
        "loss_error": worst_loss,
        "norm_error": worst_norm,
        "gradient_error": errors[parameter],
        "gradient_parameter": parameter,
        "passed": worst_loss <= LAYOUT_LOSS and errors[parameter] <= LAYOUT_GRADIENT,
    }


def run_all(layouts: list[Layout], output: Path) -> bool:
    """Run layouts that are not in ``output``; return whether all agree with the reference."""
    done = json.loads(output.read_text())["results"] if output.exists() else []
    reference = run_layout(0, None, STEPS)
    with RankPool(4) as pool:
        for layout in layouts:
            if any(Layout(**{k: row[k] for k in asdict(layout)}) == layout for row in done):
                continue
            start = time.monotonic()
            row = compare(layout, pool.run(run_layout, layout, STEPS, timeout=600), reference)
            row["seconds"] = round(time.monotonic() - start, 1)
            done.append(row)
            verdict = "same" if row["passed"] else "DIFFERS"
            print(f"{layout.name:36} loss {row['loss_error']:.1e} {verdict}", flush=True)
            write(output, done)
    return all(row["passed"] for row in done)


def write(output: Path, rows: list[dict[str, Any]]) -> None:
    """Write the result file."""
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    record = {
        "what": f"{STEPS} steps on 4 gloo ranks against one process, fp32, dropout 0.1",
        "hardware": platform.machine(),
        "torch": torch.__version__,
        "revision": revision,
        "results": rows,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".tmp")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(partial, output)


def main() -> int:
    parser = argparse.ArgumentParser(description="Every layout against one process.")
    parser.add_argument("--output", type=Path, required=True, help="JSON file, continued if there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    return 0 if run_all(ALL, args.output) else 1


if __name__ == "__main__":
    raise SystemExit(main())

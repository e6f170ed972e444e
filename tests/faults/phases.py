"""A run with three phases, killed at random steps and moved between layouts.

``python -m tests.faults.phases --folder DIR --kills 20 --output FILE`` compares three runs of the
same config: uninterrupted, killed on the same layout (the same bits) and killed and moved to
another layout each time (the same losses within 1e-5). Started again, it continues in DIR; the test
suite kills each run twice.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.lib.provenance import provenance
from megatron_deberta.config import load_config
from megatron_deberta.config.phases import segments
from megatron_deberta.data.sample_log import check_sample_log, read_sample_log
from tests.support.jobs import (
    assert_same_checkpoints,
    losses,
    prepare,
    recorded_steps,
    records,
    run_to_end,
    start,
)

PHASES = """
phases:
  - steps: 20
    data.sequence_length: 64
    objective.mask_probability: 0.3
    train.global_batch_size: 16
    train.ramp_from: 4
    train.ramp_increment: 4
    train.ramp_steps: 8
  - tokens: 20_000
    data.sequence_length: 128
    optimizer.learning_rate: 3e-3
  - steps: 16
    data.sequence_length: 256
    train.global_batch_size: 4
    train.micro_batch_size: 1
    optimizer.learning_rate: 2e-3
"""
KEYS = (
    "model.max_position_embeddings=256", "optimizer.schedule=wsd", "optimizer.decay_steps=8",
    "checkpoint.save_every=3", "train.eval_every=10", "stability.replica_check_every=5",
)  # fmt: skip
Layout = tuple[int, tuple[str, ...]]
"""Number of ranks, and overrides."""
DATA_PARALLEL: Layout = (2, ("parallel.zero_stage=1",))
LAYOUTS: tuple[Layout, ...] = (
    (2, ("parallel.tensor_parallel_size=2", "parallel.zero_stage=1")),
    (2, ("parallel.zero_stage=2",)),
    (1, ("parallel.engine=plain",)),
    (2, ("parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true")),
)


def write_run(folder: Path) -> Path:
    """Prepare text, tokenizer and shard in a folder, once; return the run with phases."""
    path = folder / "phases.yaml"
    if not path.exists():
        text = prepare(folder).read_text().replace("steps: 60, ", "")
        path.write_text(text + PHASES)
    return path


def interrupted(run: Path, run_dir: Path, layouts: Sequence[Layout], kills: int) -> None:
    """Run to the end, with SIGKILL of a rank at ``kills`` random steps.

    Args:
        run: the config.
        run_dir: run folder; ``run_dir.kills`` holds the last step before each kill.
        layouts: used in turn, another one after each kill.
        kills: number of kills.
    """
    draw = random.Random(f"{run_dir.name}{kills}")
    # The last steps are left for kills that come late.
    last = load_config(run, list(KEYS)).train.steps - 8
    steps = sorted(draw.sample(range(1, last), kills))
    journal = run_dir.with_suffix(".kills")
    done = json.loads(journal.read_text()) if journal.exists() else []
    for number in tqdm(range(len(done), kills), desc=f"{run_dir.name}: kills"):
        world_size, overrides = layouts[number % len(layouts)]
        # A step beyond those that are recorded, so that the run has resumed when it is killed.
        target = max(steps[number], newest_step(run_dir) + 1)
        job = start(run, run_dir, world_size, *KEYS, *overrides)
        job.wait_for_step(target)
        victim = draw.randrange(world_size)
        job.ranks[victim].kill()
        assert job.wait()[victim] == -signal.SIGKILL
        done.append(newest_step(run_dir))
        journal.write_text(json.dumps(done))
    world_size, overrides = layouts[kills % len(layouts)]
    run_to_end(run, run_dir, world_size, *KEYS, *overrides)


def newest_step(run_dir: Path) -> int:
    """Return the last recorded training step, or 0."""
    return max(recorded_steps(run_dir), default=0)


def compare(folder: Path, kills: int) -> dict[str, Any]:
    """Compare killed and moved runs with the uninterrupted one; return what was seen."""
    run = write_run(folder)
    whole, killed, moved = (folder / name for name in ("whole", "killed", "moved"))
    config = load_config(run, list(KEYS))
    if newest_step(whole) < config.train.steps:
        shutil.rmtree(whole, ignore_errors=True)
    run_to_end(run, whole, DATA_PARALLEL[0], *KEYS, *DATA_PARALLEL[1])
    interrupted(run, killed, [DATA_PARALLEL], kills)
    interrupted(run, moved, LAYOUTS, kills)
    sizes = [part.config.train.global_batch_size for part in segments(config) for _ in range(
        part.steps
    )]  # fmt: skip
    expected = losses(whole)
    assert losses(killed) == expected
    assert records(killed, "validation") == records(whole, "validation")
    assert_same_checkpoints(killed, whole, config.train.steps)
    for run_dir in (whole, killed, moved):
        check_sample_log(run_dir / "ledger", sizes, config.train.steps)
    assert read_sample_log(killed / "ledger") == read_sample_log(whole / "ledger")
    errors = [abs(a - b) / b for a, b in zip(losses(moved), expected, strict=True)]
    assert max(errors) < 1e-5
    return {
        "steps": config.train.steps,
        "batch_sizes": sizes,
        "losses": expected,
        "kills": {name: json.loads((folder / f"{name}.kills").read_text()) for name in (
            "killed", "moved"
        )},
        "same_bits_on_one_layout": True,
        "largest_relative_difference_of_losses_across_layouts": max(errors),
    }  # fmt: skip


def main() -> int:
    """Run the comparison and write its result."""
    parser = argparse.ArgumentParser(description="Kill a run with three phases at random steps.")
    parser.add_argument("--folder", type=Path, required=True, help="of the runs; continued")
    parser.add_argument("--kills", type=int, default=20, help="of each run (default: 20)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    result = {"provenance": provenance(), **compare(args.folder, args.kills)}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{args.output}: the same bits on one layout; across layouts the largest difference is "
          f"{result['largest_relative_difference_of_losses_across_layouts']:.1e}")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Table of docs/planning.md: peak memory and largest micro batch of the 1.5B model, by formula.

    python -m benchmarks.planning.memory

Nothing is measured; ``tests/unit/train/test_memory.py`` checks the formula.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Literal

from benchmarks.lib.provenance import ROOT
from megatron_deberta.config import RunConfig, load_config
from megatron_deberta.planning.memory import estimate_memory, largest_micro_batch

Attention = Literal["triton", "chunked"]
# Fraction of device memory reserved for driver, communication library and fragmentation.
RESERVED = 0.08
# Title, run, GB, data-parallel ranks, attention backend.
DEVICES: tuple[tuple[str, str, int, int, Attention], ...] = (
    ("V100, 32 GB, fp16, 256 ranks", "1.5b_dgx2", 32, 256, "chunked"),
    ("V100, 32 GB, fp16, 16 ranks", "1.5b_dgx2", 32, 16, "chunked"),
    ("H200, 141 GB, bf16, 64 ranks", "1.5b_h100", 141, 64, "triton"),
    ("H200, 141 GB, bf16, 1 rank", "1.5b_h100", 141, 1, "triton"),
)


def variant(run: str, recompute: str, length: int) -> RunConfig:
    """Return the run with another recomputation policy and sequence length."""
    config = load_config(ROOT / "configs" / "runs" / f"{run}.yaml")
    parallel = replace(config.parallel, recompute=recompute)  # type: ignore[arg-type]
    data = replace(config.data, sequence_length=length)
    return replace(config, parallel=parallel, data=data)


def table() -> str:
    """Return the table in Markdown, one row per device and sequence length."""
    lines = ["| Device (ZeRO-1) | N | `none` | `selective` | `full` |", "|---|---|---|---|---|"]
    for title, run, gigabytes, ranks, attention in DEVICES:
        capacity = (1 - RESERVED) * gigabytes * 1e9
        for length in (512, 2048):
            cells = []
            for recompute in ("none", "selective", "full"):
                config = variant(run, recompute, length)
                rows = largest_micro_batch(config, ranks, capacity, attention=attention)
                train = replace(config.train, micro_batch_size=max(rows, 1))
                needed = estimate_memory(replace(config, train=train), ranks, attention=attention)
                states = needed.weights + needed.gradients + needed.optimizer
                rest = needed.total - states - needed.activations
                sizes = (states, needed.activations, rest)
                shown = " + ".join(f"{size / 2**30:.1f}" for size in sizes)
                cells.append(f"{rows} ({shown})")
            lines.append(f"| {title} | {length} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(table())

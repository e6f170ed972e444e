"""The table of docs/memory.md: peak memory and largest micro batch of the 1.5B model, by formula.

    python benchmarks/memory.py

Nothing is measured; what checks the formula is ``tests/unit/train/test_memory.py``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_deberta.config import RunConfig, load_config  # noqa: E402
from megatron_deberta.train.memory import estimate_memory, largest_micro_batch  # noqa: E402

Attention = Literal["triton", "chunked"]
RESERVED = 0.08
"""Share of a device left to the driver, the communication library and fragmentation."""
DEVICES: tuple[tuple[str, str, int, int, Attention], ...] = (
    ("V100, 32 GB, fp16, 256 ranks", "1.5b_dgx2", 32, 256, "chunked"),
    ("V100, 32 GB, fp16, 16 ranks", "1.5b_dgx2", 32, 16, "chunked"),
    ("H200, 141 GB, bf16, 64 ranks", "1.5b_h100", 141, 64, "triton"),
    ("H200, 141 GB, bf16, 1 rank", "1.5b_h100", 141, 1, "triton"),
)
"""Title, run, GB, data-parallel ranks, attention backend."""


def variant(run: str, recompute: str, length: int) -> RunConfig:
    """The run with another recomputation policy and row length."""
    config = load_config(ROOT / "configs" / "runs" / f"{run}.yaml")
    parallel = replace(config.parallel, recompute=recompute)  # type: ignore[arg-type]
    data = replace(config.data, sequence_length=length)
    return replace(config, parallel=parallel, data=data)


def table() -> str:
    """Markdown, one line a device, row length and policy."""
    lines = [
        "| device (ZeRO-1) | N | recompute | largest micro batch | GiB at it: states, "
        "activations, rest |",
        "|---|---|---|---|---|",
    ]
    for title, run, gigabytes, ranks, attention in DEVICES:
        capacity = (1 - RESERVED) * gigabytes * 1e9
        for length in (512, 2048):
            for recompute in ("none", "selective", "full"):
                config = variant(run, recompute, length)
                rows = largest_micro_batch(config, ranks, capacity, attention=attention)
                train = replace(config.train, micro_batch_size=max(rows, 1))
                needed = estimate_memory(replace(config, train=train), ranks, attention=attention)
                states = needed.weights + needed.gradients + needed.optimizer
                rest = needed.total - states - needed.activations
                sizes = (states, needed.activations, rest)
                shown = ", ".join(f"{size / 2**30:.1f}" for size in sizes)
                lines.append(f"| {title} | {length} | {recompute} | {rows} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")

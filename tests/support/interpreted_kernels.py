"""Errors of the fused attention kernels on long rows, in Triton's interpreter, against float64.

    python -m tests.support.interpreted_kernels --output FILE

Runs the cases that are not in the report; one head, minutes per case. Exit code 1 if an output or a
gradient exceeds the tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Read when the kernels are imported.
os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton

from benchmarks.lib.provenance import provenance
from megatron_deberta.files import write_atomically
from megatron_deberta.ops import RelativePositions
from tests.support.attention import random_inputs, relative_error, run_attention
from tests.support.tolerances import OPERATOR

RELEASED, SHORT = RelativePositions(512, 256), RelativePositions(64, 16)
NAMES = ("output", "lse", "q", "k", "v", "pos_key", "pos_query")
CASES: dict[str, tuple[int, RelativePositions, dict[str, Any]]] = {
    "1,500 positions, far tiles": (1500, SHORT, {"dropout_p": 0.1, "seed": 3}),
    "2,048 positions, released table": (2048, RELEASED, {"dropout_p": 0.1, "seed": 3}),
    "24,528 positions, documents of 100": (
        24528,
        SHORT,
        {"document_ids": (torch.arange(24528) // 100)[None], "dropout_p": 0.1, "seed": 3},
    ),
    "24,528 positions, 9 gathered queries": (
        24528,
        SHORT,
        {"q_positions": torch.tensor([[0, 1, 5, 12000, 12000, 12070, -1, 24500, 24527]])},
    ),
}
"""Length, positions and options by name: float16, one head of 32, the tile sizes of a GPU."""


def run_case(name: str) -> dict[str, Any]:
    """Return the relative errors of a case against float64, and its seconds.

    Args:
        name: of ``CASES``.
    """
    length, positions, options = CASES[name]
    at = options.get("q_positions")
    gathered = None if at is None else at.shape[1]
    inputs = random_inputs((1, 1, length, 32), positions, gathered=gathered)
    # The reference form would need gigabytes; ``chunked`` is compared with it in other tests.
    backend = "reference" if length < 4096 else "chunked"
    expected = run_attention(inputs, torch.float64, positions, backend=backend, **options)
    begin = time.perf_counter()
    actual = run_attention(inputs, torch.float16, positions, backend="triton", **options)
    seconds = time.perf_counter() - begin
    errors = (relative_error(a, e) for a, e in zip(actual, expected, strict=True))
    return {"oracle": backend, "seconds": seconds, "errors": dict(zip(NAMES, errors, strict=True))}


def main() -> int:
    """Run the missing cases and report errors above the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name has these words")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"cases": {}}
    if arguments.output.exists():
        report = json.loads(arguments.output.read_text(encoding="utf-8"))
    limit = OPERATOR[torch.float16]
    for name in CASES:
        if name not in report["cases"] and arguments.only in name:
            result = {**run_case(name), "limit": limit, "triton": triton.__version__}
            report["cases"][name] = {**result, "provenance": provenance()}
            write_atomically(arguments.output, (json.dumps(report, indent=1) + "\n").encode())
            print(name, result, flush=True)
    errors = [x for case in report["cases"].values() for x in case["errors"].values()]
    return 1 if any(x >= limit for x in errors) else 0


if __name__ == "__main__":
    sys.exit(main())

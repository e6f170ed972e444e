"""Counted work of attention on GPUs without fused kernels."""

from __future__ import annotations

import pytest
import torch

from benchmarks.attention.batched_work import POSITIONS, measure


@pytest.mark.slow
def test_work_is_less_than_head_by_head() -> None:
    # What ran before in this process does not count.
    POSITIONS.slots(torch.empty(1, dtype=torch.int64, device="meta"))
    found = measure()
    assert found
    for row in found:
        for side, now in row["batched"].items():
            before = row["per_head"][side]
            # No product of float32 operands, which V100's tensor cores cannot multiply
            assert set(now) == set(before) - {"float32"} | {"float16"}
            assert 2.5 * now["operators"] < before["operators"]
            assert now["bytes"] < before["bytes"]
        if "efficient" in row:
            moved = {
                name: sum(part["bytes"] for part in row[name].values())
                for name in ("batched", "efficient")
            }
            assert moved["efficient"] < (0.45 if row["dropout"] else 0.6) * moved["batched"]

"""Gradient reduction: once per step, in fp32, overlapped with backward.

All collectives of a step are recorded at torch's dispatcher, with their bytes, so none is missed.
Buckets are small, so that the toy model fills them.

"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine import deepspeed_engine
from tests.support.ranks import RankPool, grid
from tests.support.toy_engine import MICRO_BATCHES, micro_batch, start, toy_config

LAST = MICRO_BATCHES - 1
NUMBERS = 64
"""Larger than overflow flags and norms, smaller than any gradient bucket."""


class Collectives(TorchDispatchMode):
    """Records the phase of the step, the name and the bytes of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.place = ""
        self.log: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operation if it communicates, and run it."""
        if func.namespace == "c10d":
            sizes = [leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.log.append((self.place, func._opname, max(sizes, default=0)))
        return func(*args, **(kwargs or {}))


def exchanged(rank: int, dtype: str, stage: int, bucket: int) -> tuple[list[Any], int]:
    """Return a step's collectives of two data-parallel ranks, and the number of parameters."""
    groups: ProcessGroups = grid(1)
    usual = deepspeed_engine.REDUCE_BUCKET_ELEMENTS
    deepspeed_engine.REDUCE_BUCKET_ELEMENTS = bucket
    try:
        engine = start(toy_config("deepspeed", dtype, stage, dp_size=groups.dp_size), groups)
    finally:
        deepspeed_engine.REDUCE_BUCKET_ELEMENTS = usual
    elements = sum(parameter.numel() for parameter in engine.module.parameters())
    seen = Collectives()

    def gradient_of_the_embedding(grad: Tensor) -> None:
        seen.place += ", at the last gradient"

    handle = next(engine.module.parameters()).register_hook(gradient_of_the_embedding)
    with seen:
        for index in range(MICRO_BATCHES):
            loss = engine.module(micro_batch(0, index, groups)) / MICRO_BATCHES
            seen.place = f"micro batch {index}"
            engine.backward(loss)
        seen.place = "update"
        engine.step(1e-3)
    handle.remove()
    engine.destroy()
    return seen.log, elements


def of_gradients(log: list[Any]) -> list[Any]:
    return [entry for entry in log if entry[0] != "update" and entry[2] > NUMBERS]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_zero_1_reduces_once_per_step_in_fp32(two_ranks: RankPool, dtype: str) -> None:
    for log, elements in two_ranks.run(exchanged, dtype, 1, 10_000):
        ((place, name, size),) = of_gradients(log)
        assert place.startswith(f"micro batch {LAST}")
        assert name == "allreduce_"
        assert 4 * elements <= size < 4 * elements + NUMBERS  # Partitions are padded.
        # After the update each rank gathers the weights; there are no other large collectives.
        rest = [entry for entry in log if entry[2] > NUMBERS and entry[0] == "update"]
        assert {entry[1] for entry in rest} <= {"_allgather_base_", "allgather_"}, rest
        assert rest


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_zero_2_reduces_once_per_micro_batch(two_ranks: RankPool, dtype: str) -> None:
    for log, elements in two_ranks.run(exchanged, dtype, 2, 10_000):
        sent = of_gradients(log)
        places = [place.split(",")[0] for place, _, _ in sent]
        assert places == [f"micro batch {index}" for index in range(MICRO_BATCHES)]
        assert all(4 * elements <= size < 4 * elements + NUMBERS for _, _, size in sent)


@pytest.mark.parametrize(("dtype", "stage"), [("fp32", 1), ("bf16", 1), ("bf16", 2)])
def test_full_buckets_are_reduced_during_backward(
    two_ranks: RankPool, dtype: str, stage: int
) -> None:
    log, elements = two_ranks.run(exchanged, dtype, stage, 120)[0]
    sent = [entry for entry in of_gradients(log) if entry[0].startswith(f"micro batch {LAST}")]
    early = [entry for entry in sent if entry[0] == f"micro batch {LAST}"]
    assert len(early) >= 2
    # Each gradient is reduced once.
    assert 4 * elements <= sum(size for _, _, size in sent) < 4 * elements + NUMBERS * len(sent)
